"""CI-Net (Zhang et al. 2023): the weights of an untrained convolutional network are moved in place of pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.choosing import judged_by_noise, plausible
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.iterates import Iterates
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
from fedveil.tree import per_client


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
    the step that comes nearest to the original, which no attacker knows. Where the law of a defense's noise is known,
    the attacker who knows it stops at the first step that leaves no more unexplained than the noise would.
    """

    paper = "Zhang, Zhang, Sotthiwat, Xu, Liu, Zhen, Liu, Generative Gradient Inversion, ICCV 2023"
    steps: Count = 400  # steps of Adam
    lr: Positive = 1e-3  # Adam's rate
    total_variation: NonNegative = 0.0  # weight of the prior that favors smooth pictures
    cost: MatchName = "cosine"  # how the updates are compared
    signed: bool = True  # Adam sees the sign of the gradient only
    decay: bool = False  # the rate falls to a tenth at 3/8, 5/8 and 7/8 of the steps
    lowest: bool = True  # hand in the step with the lowest matching cost, not the last one
    # Steps of L-BFGS on the pixels at the end, each of 20 inner ones: kept where it comes to explain the update.
    polish: RepeatsOrZero = 0
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

    def run(self, scene: Scene, fitted: Any = None) -> Reconstruction:
        """Match the update of every victim; under noise of a known law, stop in time."""
        self.check(scene)
        found = super().run(scene, fitted)
        known = scene.knowledge()
        noisy = bool(scene.chain.defenses) and known.reweight is None and not known.reach and judged_by_noise(scene)
        return stopped_in_time(scene, found) if noisy else found

    @classmethod
    def figure2(cls) -> CINet:
        """As Gradient Dropout runs it for its Figure 2: 4000 steps."""
        return cls(steps=4000)

    @classmethod
    def figure3(cls) -> CINet:
        """As Gradient Dropout runs it for its Figure 3: 1000 steps."""
        return cls(steps=1000)

    @classmethod
    def high_resolution(cls) -> CINet:
        """As it is run on pictures of 256 pixels: 30,000 steps."""
        return cls(steps=30_000)


def stopped_in_time(scene: Scene, found: Reconstruction) -> Reconstruction:
    """Every victim's way up to the first noted step that the defense's noise explains (discrepancy principle).

    The unexplained part falls along the way, so the step is found by bisection. Where no noted step is explained, what
    was found stays. `found` is not to be used any more.
    """
    assert isinstance(found.iterates, Iterates)
    assert found.costs is not None
    victims = torch.arange(scene.count)
    first, end = torch.zeros_like(victims), torch.full_like(victims, len(found.iterates))
    while bool((first < end).any()):
        middle = (first + end) // 2
        at = _at(found.iterates, middle.clamp_max(len(found.iterates) - 1)).to(found.inputs)
        passes = plausible(scene, replace(found, inputs=at)) & (first < end)
        end = torch.where(passes, middle, end)
        first = torch.where(passes | (first >= end), first, middle + 1)
    stops, last = end < len(found.iterates), end.clamp_max(len(found.iterates) - 1)
    wins = stops.to(found.inputs.device)
    inputs = torch.where(per_client(wins, found.inputs), _at(found.iterates, last).to(found.inputs), found.inputs)
    stays = inputs.float().cpu()  # from the stop on
    way = [torch.where(per_client(step > last, stays), stays, each) for step, each in enumerate(found.iterates)]
    found.iterates.take(stops, way)
    return replace(found, inputs=inputs, cost=torch.where(wins, found.costs[victims, last], found.cost))


def _at(iterates: Iterates, steps: Tensor) -> Tensor:
    """Every victim's inputs at a step of its own."""
    read = {step: iterates[step] for step in steps.unique().tolist()}
    return torch.stack([read[step][victim] for victim, step in enumerate(steps.tolist())])
