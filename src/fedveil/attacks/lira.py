"""LiRA: how sure is the model of an example, beside models of the same kind that never saw it?"""

from __future__ import annotations

import time
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.confidence import confidences
from fedveil.attacks.finding import Membership, Question
from fedveil.attacks.lab import Lab
from fedveil.attacks.loss_threshold import forward_seconds
from fedveil.attacks.scene import Scene
from fedveil.errors import FedveilError
from fedveil.fields import Count, NonNegative, declared
from fedveil.registry import attacks
from fedveil.tensorfile import grouped, prefixed


@attacks.register("lira")
@declared
class LiRA(Attack):
    """Take an example for a member if the model is surer of it than reference models are that were trained without it.

    The offline form of the paper: the attacker trains reference models on its own auxiliary data, as the federation
    trains, from the same first weights; one who knows the defense, under it. For each example the references' log-odds
    of the right class make a Gaussian, and the score is how far above it the attacked model lies. So an example that is
    easy for every model is no member for being easy.
    """

    paper: ClassVar[str] = "Carlini et al., Membership Inference Attacks From First Principles, 2022"
    question: ClassVar[Question] = "member"
    looks_at: ClassVar[Literal["updates", "model"]] = "model"
    modalities: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset({"suspects", "auxiliary"})
    learns_about: ClassVar[frozenset[str]] = frozenset({"defense", "training"})
    revision: ClassVar[int] = 1

    references: Count = 16  # models that are trained on random parts of the auxiliary data
    # By how many references the spread of one example is drawn to that of all: few references tell little of it.
    shared_spread: NonNegative = 16.0

    def estimate(self, scene: Scene) -> Work:
        """Every reference looks at every example. How long they train is not known here."""
        return Work(1, (self.references + 1) * forward_seconds(scene))

    def fit(self, lab: Lab) -> dict[str, Tensor]:
        """Train the reference models, each on another random part as large as the clients' data, or half of what is."""
        if lab.training is None or lab.auxiliary is None:
            raise FedveilError("lira trains reference models on auxiliary data, which needs an audit that trains")
        there = len(lab.auxiliary)
        size = max(1, min(lab.training.examples, there // 2))
        made = []
        for number in range(self.references):
            chosen = lab.streams.fold("reference", number).permutation(there)[0, :size]
            params, buffers = lab.training(lab.auxiliary.subset(chosen), lab.chain, number)
            made.append(prefixed("params", params) | prefixed("buffers", buffers))
            if lab.report:
                lab.report(number + 1, self.references)
        return {name: torch.stack([each[name] for each in made]) for name in made[0]}

    def run(self, scene: Scene, fitted: dict[str, Tensor] | None = None) -> Membership:
        """How far above its references the model is, in their standard deviations."""
        if scene.suspects is None or fitted is None:
            raise FedveilError("lira needs examples in question and reference models, and here there are none")
        begun = time.perf_counter()
        weights = {**scene.updates.before.row(0), **scene.updates.buffers.row(0)}
        own = confidences(scene.public, weights, scene.suspects)
        groups = grouped(fitted)
        stacked = {**groups["params"], **groups.get("buffers", {})}
        beside = torch.stack(
            [
                confidences(scene.public, {name: tensor[number] for name, tensor in stacked.items()}, scene.suspects)
                for number in range(len(next(iter(stacked.values()))))
            ]
        )
        scores = beyond(own, beside, self.shared_spread)
        return Membership(scores[None], time.perf_counter() - begun)


def beyond(own: Tensor, beside: Tensor, shared: float) -> Tensor:
    """By how many standard deviations each of N values is above R others of its own, (R, N): shape (N,).

    shared: so many of the R are as if drawn with the mean spread of all N.
    """
    count = len(beside)
    spread = beside.var(0, correction=0)
    spread = (count * spread + shared * spread.mean()) / (count + shared)
    return (own - beside.mean(0)) / spread.sqrt().clamp_min(1e-12)
