"""What attacks that search with a generator share: where the generator comes from, and which priors are tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.base import Work
from fedveil.attacks.candidate import Learned
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.generator import (
    REVISION,
    GeneratorSettings,
    as_pixels,
    check_shape,
    evenly_spread,
    range_of,
    trained,
    training_seconds,
)
from fedveil.attacks.lab import Lab
from fedveil.attacks.latent import LOW, SPAN, Latents
from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.optimizers import Adam
from fedveil.attacks.prior_file import prior_at
from fedveil.attacks.priors import Box
from fedveil.attacks.recipe import LabelsFrom, Phase, Recipe
from fedveil.attacks.scene import Scene
from fedveil.attacks.threat import ThreatModel
from fedveil.errors import FedveilError
from fedveil.fields import Count, NonNegative, Positive, RepeatsOrZero, field_values

NEARER = (1e-1, 3e-2, 1e-2, 3e-3)  # weights of the latents' norm that are tried where there is a defense
HELD_OUT = "held out"  # what `fit` notes beside the generator: how well it gives back pictures held out


class GeneratorAttack(GradientMatching):
    """Base of the attacks that search among the pictures a generator draws. They override `recipe`.

    The generator is trained on the auxiliary data, or read from a file that `fedveil prior train` wrote.
    """

    revision = 4
    learns_about = frozenset()  # one generator serves every model and defense
    steps: Count
    lr: Positive
    latent_norm: NonNegative
    labels: LabelsFrom
    prior: str
    latents: Count
    epochs: RepeatsOrZero
    most: Count

    @property
    def needs(self) -> frozenset[str]:
        """Auxiliary data, unless there is a file; and what follows from where the labels come from."""
        return super().needs | (frozenset() if self.prior else {"auxiliary"})

    @property
    def content(self) -> str:
        """The hash of the file, if there is one."""
        return prior_at(self.prior).sha256 if self.prior else ""

    @property
    def brings(self) -> str:
        """What the generator in the file was trained on."""
        return f"a generator trained on {prior_at(self.prior).header.words}" if self.prior else ""

    @property
    def threat(self) -> ThreatModel:
        """With the generator, if it comes from a file."""
        model = super().threat
        return replace(model, has=(*model.has, self.brings)) if self.prior else model

    @property
    def training(self) -> GeneratorSettings:
        """How the generator is trained."""
        return GeneratorSettings(latents=self.latents, epochs=self.epochs, most=self.most)

    @property
    def width(self) -> int:
        """The latents of the generator, trained or from a file."""
        return prior_at(self.prior).header.latents if self.prior else self.latents

    @property
    def learning(self) -> list[Any]:
        """Attacks share a generator that was trained in the same way, or read from the same file."""
        return ["generator", REVISION, self.content or field_values(self.training)]

    def check(self, scene: Scene) -> None:
        """Refuse pictures that no generator can draw, and a file that is not for pictures like these."""
        shape = scene.public.layout.shape
        check_shape(shape)
        if self.prior and prior_at(self.prior).header.shape != shape:
            drawn = prior_at(self.prior).header.shape
            raise FedveilError(f"{self.prior} draws pictures of shape {drawn}, and here they are of shape {shape}")

    def fit(self, lab: Lab) -> Learned:
        """The generator, and the range of what it draws."""
        shape, box = lab.public.layout.shape, lab.public.layout.box
        if self.prior:
            prior = prior_at(self.prior)
            weights, held_out = prior.weights, prior.header.held_out
            own = prior.header.normalization
            box = box or (own.box() if own else (torch.zeros(1, 1, 1), torch.ones(1, 1, 1)))
        else:
            if lab.auxiliary is None or not len(lab.auxiliary):
                raise FedveilError(f"{self.name} learns from auxiliary pictures, and there are none: give it a `prior`")
            inputs, labels = lab.auxiliary.batch(evenly_spread(len(lab.auxiliary), self.most))
            assert isinstance(inputs, Tensor)  # pictures are
            box = box or range_of(inputs)
            classes = max(lab.public.classes or 0, int(labels.max()) + 1)
            streams = lab.streams.fold("generator")
            weights, held_out, _ = trained(as_pixels(inputs, box), labels, classes, self.training, streams, lab.report)
        return {**weights, **_range(box, shape), HELD_OUT: torch.tensor(held_out)}

    def run(self, scene: Scene, fitted: Mapping[str, Tensor] | None = None) -> Reconstruction:
        """Match with the generator that `fit` returned."""
        if fitted is None:
            raise FedveilError(f"{self.name} needs a generator: give it what its `fit` returned")
        learned = {name: tensor.to(scene.like) for name, tensor in fitted.items() if name != HELD_OUT}
        return super().run(scene, learned)

    def estimate(self, scene: Scene) -> Work:
        """The steps of the search, and before it the training of the generator."""
        shape = scene.public.layout.shape
        fitting = 0.0 if self.prior else training_seconds(shape, self.training)
        return replace(super().estimate(scene), fit_seconds=fitting)

    # ---- recipes -------------------------------------------------------------------------------------------

    def in_latents(self, weight: float | None = None) -> Phase:
        """The search among the generator's pictures, with another weight of the latents' norm than the usual."""
        candidate = Latents(self.latent_norm if weight is None else weight)
        return Phase(self.steps, Adam(lr=self.lr, signed=False, decay=False), candidate=candidate, priors=())

    @property
    def slack(self) -> float:
        """Nats by which the truth is expected to explain an update worse than what fits best: half for each latent."""
        return self.width / 2

    def in_latents_alone(self, weights: tuple[float, ...]) -> tuple[Recipe, ...]:
        """This search and nothing after it, for each of some weights, the strongest first."""
        strengths = [*(each for each in weights if each > self.latent_norm), self.latent_norm]
        return tuple(
            Recipe(tries=((self.in_latents(each),),), labels=self.labels, slack=self.slack) for each in strengths
        )

    def besides(self) -> tuple[Recipe, ...]:
        """Pictures of the generator as they are: where a defense leaves little, whatever refines them spoils them."""
        return self.in_latents_alone(NEARER[1:2])

    def under_noise(self) -> tuple[Recipe, ...]:
        """The same for several weights of the latents' norm."""
        return self.in_latents_alone(NEARER)


def _range(box: Box, shape: tuple[int, ...]) -> Learned:
    low, high = (bound.float().expand(shape) for bound in box)
    return {LOW: low.contiguous(), SPAN: (high - low).contiguous()}
