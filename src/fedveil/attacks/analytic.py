"""The analytic attack: inputs of a linear first layer, exactly, from its gradient rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.labels import _whole, last_linear
from fedveil.attacks.linear_inputs import LinearInputs, lone_rows, recover_inputs, span_of, trusted_rows
from fedveil.attacks.scene import Scene
from fedveil.errors import FedveilError
from fedveil.fields import Count, declared
from fedveil.registry import attacks
from fedveil.tasks.layout import Layout
from fedveil.tree import Tree

REPRODUCED = 0.05  # share of an input's own gradient that may lie outside the span of the update's: rounding, not chance


@attacks.register("analytic")
@declared
class Analytic(Attack):
    """Solve for the inputs of a linear first layer with a bias. Exact, and no optimization."""

    paper = (
        "Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, 2018 (batches of one); "
        "Dimitrov et al., SPEAR: Exact Gradient Inversion of Batches in Federated Learning, 2024 (larger ones)"
    )
    question = "reconstruct"
    revision = 1
    tries: Count = 2**16  # sets of rows to invert at most, in the search for the inputs of a batch

    def check_model(self, model: nn.Module, layout: Layout) -> None:
        """Refuse a model without a linear layer that takes the input itself; before any long work."""
        input_layer(model, layout)

    def run(self, scene: Scene, fitted: object = None) -> Reconstruction:
        """Solve for every victim's batch, one after another."""
        start = time.perf_counter()
        layer = input_layer(scene.public.model, scene.public.layout)
        solver = _Solver(scene, layer, scene.knowledge().target, scene.knowledge().weight)
        solved = []
        for victim in range(scene.count):
            solved.append(solver.solve(victim, self.tries))
            if scene.bench.report:
                scene.bench.report(victim + 1, scene.count)
        return Reconstruction(
            inputs=torch.stack([one.inputs for one in solved]).to(scene.like),
            labels=torch.stack([one.labels for one in solved]),
            cost=torch.tensor([one.cost for one in solved]).to(scene.like),
            seconds=time.perf_counter() - start,
        )
