"""The generator as a start: search among the pictures it draws, then move pixels from there."""

from __future__ import annotations

from dataclasses import replace

from fedveil.attacks.generator_attack import GeneratorAttack
from fedveil.attacks.optimizers import Adam
from fedveil.attacks.polish import LIKELIEST_STEPS, by_noise, polishing
from fedveil.attacks.priors import TotalVariation
from fedveil.attacks.recipe import LabelsFrom, Phase, Recipe
from fedveil.fields import Count, NonNegative, Positive, RepeatsOrZero, declared
from fedveil.registry import attacks

PIXEL_RATE = 0.02  # Adam's rate for pixels, which begin near their end
SMOOTHER = 1e-2  # weight of total variation where a defense adds noise


@attacks.register("latent-start")
@declared
class LatentStart(GeneratorAttack):
    """Search among the pictures that a generator draws, then move their pixels, and polish.

    Inverting Gradients from a better start. Its search from noise often ends in a picture that merely has a similar
    gradient; from the generator's best picture it goes to the right one. That takes batches further, and whatever
    a defense left little of: there the generator's picture itself is what the attacker who knows the defense keeps.
    """

    paper = "after Jeon et al., Gradient Inversion with Generative Image Prior, and Geiping et al., Inverting Gradients"
    steps: Count = 200  # steps in the latent space
    lr: Positive = 0.1  # Adam's rate in the latent space
    latent_norm: NonNegative = 3e-4  # weight of the latents' mean square
    pixel_steps: Count = 50  # steps of Adam on pixels
    total_variation: NonNegative = 1e-5  # weight of the prior that favors smooth pictures, while pixels are moved
    polish: RepeatsOrZero = 20  # steps of L-BFGS at the end, each of 20 inner ones: see inverting-gradients
    restarts: Count = 1  # tries; the one with the lowest final cost wins
    labels: LabelsFrom = "known"  # told, read off the update (idlg: of a batch of one), or optimized
    prior: str = ""  # a file of `fedveil prior train`; empty: the generator is trained on the auxiliary data
    latents: Count = 64  # of a generator that is trained: numbers that stand for a picture
    epochs: RepeatsOrZero = 0  # passes over the pictures it is trained on; 0: as many as make 3,000 steps
    most: Count = 20_000  # pictures it is trained on

    def recipe(self) -> Recipe:
        """1 − cosine, Adam on latents, then on pixels, then L-BFGS."""
        adam = Adam(lr=PIXEL_RATE, signed=False)
        phases = [self.in_latents(), Phase(self.pixel_steps, adam)]
        phases += [polishing(self.polish)] if self.polish else []
        priors = (TotalVariation(self.total_variation),) if self.total_variation else ()
        return Recipe(priors=priors, tries=(tuple(phases),) * self.restarts, labels=self.labels)

    def under_noise(self) -> tuple[Recipe, ...]:
        """The generator's pictures, and where it cannot draw the right one, pixels from there with a strong prior.

        Of these, where the noise is known, the likeliest; else what matches with total variation.
        """
        smooth = (self.in_latents(), Phase(self.pixel_steps, Adam(lr=PIXEL_RATE, signed=False)))
        refined = replace(self.recipe(), priors=(TotalVariation(SMOOTHER),), tries=(smooth,))
        found = [*super().under_noise(), refined]
        if self.polish:
            likeliest = (self.in_latents(), by_noise(LIKELIEST_STEPS))
            found.insert(-1, replace(refined, tries=(likeliest,), by_noise=True))
        return tuple(found)
