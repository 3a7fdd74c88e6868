"""Stochastic gradient descent on trees, as `torch.optim.SGD` does it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedveil.clients.engine import Tensors


def sgd_step(
    params: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor],
    velocity: Mapping[str, Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> tuple[Tensors, Tensors]:
    """The weights and the velocity after one step. Works on one model and on stacked clients alike.

    Without momentum there is no velocity: an empty dict goes in and comes out. With it, a run starts at zeros.
    """
    moved: Tensors = {}
    faster: Tensors = {}
    for name, weight in params.items():
        step = gradient[name]
        if weight_decay:
            step = step + weight_decay * weight
        if momentum:
            step = faster[name] = momentum * velocity[name] + step
        moved[name] = torch.sub(weight, step, alpha=lr)
    return moved, faster


def at_rest(params: Mapping[str, Tensor], momentum: float) -> Tensors:
    """The velocity at the start."""
    return {name: torch.zeros_like(weight) for name, weight in params.items()} if momentum else {}
