"""Local training behind a FedAvg update, unrolled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedveil.attacks.scene import LocalSteps
from fedveil.defenses.base import StepsBefore

Row = dict[str, Tensor]


def unrolled(
    gradient: Callable[..., Row], local: LocalSteps, params: Row, buffers: Row, inputs: Tensor, labels: Tensor
) -> Row:
    """The pseudo-gradient of local SGD, step by step, as a differentiable function of the inputs.

    Its scale is that of `Updates.gradient`: a constant gradient comes out as itself.
    """
    weights, velocity = params, {name: torch.zeros_like(w) for name, w in params.items()}
    batches = -(-len(inputs) // local.batch_size)  # the last of an epoch may be smaller
    scale = pace = 0.0
    for step in range(local.steps):
        batch = slice((step % batches) * local.batch_size, (step % batches + 1) * local.batch_size)
        found = gradient(weights, buffers, inputs[batch], labels[batch])
        found = {n: g + local.weight_decay * weights[n] for n, g in found.items()} if local.weight_decay else found
        velocity = {n: local.momentum * velocity[n] + g for n, g in found.items()}
        pace = local.momentum * pace + 1
        scale += local.lr * pace
        weights = {n: w - local.lr * velocity[n] for n, w in weights.items()}
    return {name: (params[name] - w) / scale for name, w in weights.items()}


def after_steps(
    gradient: Callable[..., Row], before: StepsBefore, params: Row, buffers: Row, inputs: Tensor, labels: Tensor
) -> Row:
    """The gradient at the weights that some plain steps on the same batch lead to."""
    weights = params
    for _ in range(before.steps):
        found = gradient(weights, buffers, inputs, labels)
        weights = {name: w - before.lr * found[name] for name, w in weights.items()}
    return gradient(weights, buffers, inputs, labels)
