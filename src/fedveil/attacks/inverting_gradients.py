"""Inverting Gradients (Geiping et al. 2020)."""

from __future__ import annotations

from dataclasses import replace

from fedveil.attacks.match import MatchName
from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.optimizers import Adam
from fedveil.attacks.polish import LIKELIEST_STEPS, by_noise, polishing
from fedveil.attacks.priors import TotalVariation
from fedveil.attacks.recipe import LabelsFrom, Phase, Recipe
from fedveil.fields import Count, NonNegative, Positive, RepeatsOrZero, declared
from fedveil.registry import attacks

PATIENCE = 25  # steps of Adam in which nothing changes: a victim waits for the next rate
SMOOTHER = (3e-2, 1e-2, 3e-3)  # weights of the prior that are tried where a defense adds noise


@attacks.register("inverting-gradients")
@declared
class InvertingGradients(GradientMatching):
    """Match the direction of the gradient (cosine) with signed Adam and a total-variation prior.

    Pixels are boxed to their valid range after every step; the rate falls to a tenth at 3/8, 5/8 and 7/8 of the
    steps unless `decay` is off; of several restarts the lowest final cost without the prior wins.

    Our reading: two tries, the first with the sign of the gradient, as published, the second with the gradient itself
    (`alternate`). Which of them gets further depends on the model: on LeNet the second recovers 11 dB more, on
    LeNet-5 the first 6 dB. An audit should not hang on that. And each is polished: where the model is smooth, a few
    steps of L-BFGS take what Adam found to the very inputs. The presets are single tries without it, as published.
    """

    paper = "Geiping, Bauermeister, Dröge, Moeller, Inverting Gradients, NeurIPS 2020"
    modalities = ("pictures", "records")
    steps: Count = 1600  # steps of Adam
    lr: Positive = 0.1  # Adam's rate at the start
    total_variation: NonNegative = 1e-5  # α in the paper: weight of the prior that favors smooth pictures
    cost: MatchName = "cosine"  # how the updates are compared
    signed: bool = True  # Adam sees the sign of the gradient only
    decay: bool = True  # the rate falls to a tenth at 3/8, 5/8 and 7/8 of the steps
    # Steps of L-BFGS at the end, each of 20 inner ones: squared distance, kept where it comes to explain the update.
    polish: RepeatsOrZero = 20
    restarts: Count = 2  # tries; the one with the lowest final cost wins
    alternate: bool = True  # every second try turns `signed` round
    settle: bool = True  # a victim whose cost stays as it is rests until Adam's rate falls, or for good
    labels: LabelsFrom = "known"  # told, read off the update (idlg: of a batch of one), or optimized with the pixels

    def recipe(self) -> Recipe:
        """1 − cosine, Adam on the sign of the gradient, total variation, box."""
        tries = []
        for attempt in range(self.restarts):
            signed = self.signed != (self.alternate and attempt % 2 == 1)
            descent = Phase(self.steps, self._adam(signed))
            tries.append((descent, polishing(self.polish)) if self.polish else (descent,))
        priors = (TotalVariation(self.total_variation),) if self.total_variation else ()
        return Recipe(match=self.cost, priors=priors, tries=tuple(tries), labels=self.labels)

    def _adam(self, signed: bool) -> Adam:
        return Adam(lr=self.lr, signed=signed, decay=self.decay, patience=PATIENCE if self.settle else None)

    def under_noise(self) -> tuple[Recipe, ...]:
        """A single try each with more total variation, and steps of the gradient itself: signs follow the noise.

        Before them, where the attack is polished, the likeliest picture: from where a quarter of the steps lead to.
        """
        plain, descent = self.recipe(), Phase(self.steps, self._adam(signed=False))
        strengths = [weight for weight in SMOOTHER if weight > self.total_variation]
        found = [replace(plain, priors=(TotalVariation(weight),), tries=((descent,),)) for weight in strengths]
        if self.polish and found:
            short = replace(descent, steps=max(self.steps // 4, 1))
            found.insert(0, replace(found[0], tries=((short, by_noise(LIKELIEST_STEPS)),), by_noise=True))
        return tuple(found)

    @classmethod
    def fedem(cls) -> InvertingGradients:
        """As FedEM runs it: 1600 steps at a fixed rate."""
        return cls(steps=1600, decay=False, restarts=1, polish=0, settle=False)

    @classmethod
    def fedbarre(cls) -> InvertingGradients:
        """As FedBARRE runs it: 2500 steps at a fixed rate."""
        return cls(steps=2500, decay=False, restarts=1, polish=0, settle=False)

    @classmethod
    def gradient_dropout(cls) -> InvertingGradients:
        """As Gradient Dropout runs it: 4000 steps."""
        return cls(steps=4000, restarts=1, polish=0, settle=False)
