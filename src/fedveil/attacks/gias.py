"""GIAS (Jeon et al. 2021): gradient inversion in the latent space and then in the weights of a generator."""

from __future__ import annotations

import math
from dataclasses import replace

from fedveil.attacks.generator import decoder_of, shapes_of
from fedveil.attacks.generator_attack import GeneratorAttack
from fedveil.attacks.latent import GeneratorCopies
from fedveil.attacks.optimizers import Adam
from fedveil.attacks.priors import TotalVariation
from fedveil.attacks.recipe import LabelsFrom, Phase, Recipe
from fedveil.attacks.scene import Scene
from fedveil.fields import Count, NonNegative, Positive, RepeatsOrZero, declared
from fedveil.registry import attacks

MOST_NUMBERS = 2**24  # in the copies of a generator that are moved at a time; Adam holds four times as many


@attacks.register("gias")
@declared
class GIAS(GeneratorAttack):
    """Search among the pictures that a generator draws, then move a copy of the generator for every picture.

    The latents that decode to pictures whose gradient has the observed direction (cosine) are found first. What the
    generator cannot draw is then reached by moving its weights, a copy of them for each picture, at these latents.

    Our reading: the generator is the decoder of a small autoencoder, trained on auxiliary data (the paper takes
    published GANs), and a search starts at the mean picture of its label's class. The defaults are for a desk;
    `published` has the steps and rates of the paper.
    """

    paper = "Jeon, Kim, Lee, Oh, Ok, Gradient Inversion with Generative Image Prior, NeurIPS 2021"
    steps: Count = 200  # steps in the latent space
    weight_steps: Count = 100  # steps of the weights of each picture's generator
    lr: Positive = 0.1  # Adam's rate in the latent space
    weight_lr: Positive = 1e-3  # Adam's rate for the weights
    latent_norm: NonNegative = 3e-4  # weight of the latents' mean square
    total_variation: NonNegative = 1e-6  # weight of the prior that favors smooth pictures, while weights are moved
    restarts: Count = 1  # tries; the one with the lowest final cost wins
    labels: LabelsFrom = "known"  # told, read off the update (idlg: of a batch of one), or optimized
    prior: str = ""  # a file of `fedveil prior train`; empty: the generator is trained on the auxiliary data
    latents: Count = 64  # of a generator that is trained: numbers that stand for a picture
    epochs: RepeatsOrZero = 0  # passes over the pictures it is trained on; 0: as many as make 3,000 steps
    most: Count = 20_000  # pictures it is trained on

    def recipe(self) -> Recipe:
        """1 − cosine, Adam on latents, then on copies of the weights."""
        priors = (TotalVariation(self.total_variation),) if self.total_variation else ()
        adam = Adam(lr=self.weight_lr, signed=False)
        phases = (self.in_latents(), Phase(self.weight_steps, adam, candidate=GeneratorCopies()))
        return Recipe(priors=priors, tries=(phases,) * self.restarts, labels=self.labels)

    def under_noise(self) -> tuple[Recipe, ...]:
        """The generator's own pictures, and those of copies, which few steps hardly fit to noise."""
        return (*super().under_noise(), replace(self.recipe(), slack=self.slack))

    def pieces(self, scene: Scene) -> list[Scene]:
        """No more victims than copies of a generator fit into memory."""
        shapes = decoder_of(shapes_of(scene.public.layout.shape, self.width, 1))
        numbers = scene.batch_size * sum(map(math.prod, shapes.values()))
        found = super().pieces(scene)
        chunk = max(1, min(found[0].count, MOST_NUMBERS // numbers))
        return super().pieces(replace(scene, bench=replace(scene.bench, chunk=chunk)))

    @classmethod
    def published(cls) -> GIAS:
        """With the steps and rates of the paper."""
        return cls(steps=800, weight_steps=3200, lr=0.03, weight_lr=1e-3)
