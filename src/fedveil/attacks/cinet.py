"""CI-Net (Zhang et al. 2023): the weights of an untrained convolutional network are moved in place of pixels."""

from __future__ import annotations

from dataclasses import replace

from fedveil.attacks.base import Work
from fedveil.attacks.match import MatchName
from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.optimizers import Adam
from fedveil.attacks.polish import polishing
from fedveil.attacks.priors import TotalVariation
from fedveil.attacks.recipe import LabelsFrom, Phase, Recipe
from fedveil.attacks.scene import Scene
from fedveil.attacks.untrained import Lowest, Plan, UntrainedNetwork
from fedveil.fields import Count, NonNegative, Positive, RepeatsOrZero, declared
from fedveil.registry import attacks

SMOOTHER = (3e-2, 1e-2, 3e-3)  # weights of total variation that are tried where a defense adds noise
PASSES = 3  # that drawing a picture and its slope take
DRAWING_SPEED = 2e10  # operations a second of one core, measured on pictures of 28 to 224 pixels


@attacks.register("ci-net")
@declared
class CINet(GradientMatching):
    """Match the direction of the gradient with pictures that an untrained convolutional network draws.

    Its weights are moved by Adam on the sign of their gradient, from fixed noise for each picture of the batch. It has
    more parameters than the batch has pixels, so it can draw anything; but convolutions draw smooth and repeated
    patterns first and noise last, which is a prior that nobody had to train.

    Our reading, from the paper and its code: see `UntrainedNetwork` for the layers. Three things differ. The picture is
    scaled to the valid range, of which the published network draws a part that depends on the data. Sides need not be
    powers of two. And the result is the step with the lowest matching cost, or the last; the published notebook shows
    the step that comes nearest to the original, which no attacker knows.
    """

    paper = "Zhang, Zhang, Sotthiwat, Xu, Liu, Zhen, Liu, Generative Gradient Inversion, ICCV 2023"
    steps: Count = 300  # steps of Adam
    lr: Positive = 1e-3  # Adam's rate
    total_variation: NonNegative = 0.0  # weight of the prior that favors smooth pictures
    cost: MatchName = "cosine"  # how the updates are compared
    signed: bool = True  # Adam sees the sign of the gradient only
    decay: bool = False  # the rate falls to a tenth at 3/8, 5/8 and 7/8 of the steps
    lowest: bool = True  # hand in the step with the lowest matching cost, not the last one
    # Steps of L-BFGS on the pixels at the end, each of 20 inner ones: kept where it comes to explain the update.
    polish: RepeatsOrZero = 20
    restarts: Count = 1  # tries, each with another network; the one with the lowest final cost wins
    labels: LabelsFrom = "known"  # told, read off the update (idlg: of a batch of one), or optimized with the weights

    def recipe(self) -> Recipe:
        """1 − cosine, the weights of a network, Adam on the sign of their gradient."""
        adam = Adam(lr=self.lr, signed=self.signed, decay=self.decay)
        drawing = Phase(self.steps, Lowest(adam) if self.lowest else adam, candidate=UntrainedNetwork())
        # Only the network's phase moves weights: whatever follows it, such as weighing entries anew, moves pixels.
        phases = (drawing, polishing(self.polish)) if self.polish else (drawing,)
        priors = (TotalVariation(self.total_variation),) if self.total_variation else ()
        return Recipe(match=self.cost, priors=priors, tries=(phases,) * self.restarts, labels=self.labels)

    def check(self, scene: Scene) -> None:
        """Refuse inputs that are no pictures, or too small."""
        Plan.of(scene.batch_size, scene.public.layout.shape)

    def estimate(self, scene: Scene) -> Work:
        """What matching takes, and beside it drawing the pictures and differentiating that."""
        work = super().estimate(scene)
        victims = scene.count / len(self.pieces(scene))  # that share a step
        plan = Plan.of(scene.batch_size, scene.public.layout.shape)
        drawing = work.steps * victims * scene.batch_size * PASSES * plan.operations / DRAWING_SPEED
        return replace(work, seconds=work.seconds + drawing)

    def under_noise(self) -> tuple[Recipe, ...]:
        """A single try each with total variation, which the network's own taste for smooth pictures cannot replace."""
        plain = self.recipe()
        phases = plain.tries[0][:1]
        strengths = [weight for weight in SMOOTHER if weight > self.total_variation]
        return tuple(replace(plain, priors=(TotalVariation(weight),), tries=(phases,)) for weight in strengths)

    @classmethod
    def figure2(cls) -> CINet:
        """As Gradient Dropout runs it for its Figure 2: 4000 steps."""
        return cls(steps=4000, polish=0)

    @classmethod
    def figure3(cls) -> CINet:
        """As Gradient Dropout runs it for its Figure 3: 1000 steps."""
        return cls(steps=1000, polish=0)

    @classmethod
    def high_resolution(cls) -> CINet:
        """As it is run on pictures of 256 pixels: 30,000 steps."""
        return cls(steps=30_000, polish=0)
