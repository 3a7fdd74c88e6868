"""Clipping: bound the norm of what is shared."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength, trusting
from fedveil.fields import Positive, declared
from fedveil.registry import defenses
from fedveil.tree import HALF, Tree, per_client


@defenses.register("clip")
@declared
class Clip(Defense):
    """Scale each client's update down to a norm of at most `norm`.

    The bound holds for the numbers that go out, rounded as they are, in half precision too: it is the sensitivity of
    noise that follows in a chain. On its own clipping hides the scale only, which an attack on the direction (cosine)
    does not need.
    """

    weaknesses = ("The direction of the gradient, which is all that a cosine attack matches, is untouched.",)
    strength = Strength("norm", "down", weak=10.0, strong=0.01)
    norm: Positive = 1.0  # largest norm of an update
    order: Literal["l1", "l2"] = "l2"  # in which norm it is measured
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    def protect(self, update: Tree, call: Call) -> Tree:
        """g · min(1, norm/‖g‖) for each client."""
        return clipped(update, self.norm, self.order)

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """The direction is right, and the size may have been any larger one."""
        factor = facts.in_target(self.acts_at) if self.order == "l2" else None
        return trusting(observed, bound=math.inf if factor is None else self.norm * factor)

    @property
    def random(self) -> bool:
        """No."""
        return False


def clipped(update: Tree, norm: float, order: Literal["l1", "l2"] = "l2") -> Tree:
    """Every row scaled down to a norm of at most `norm`, also after rounding: noise is measured by that bound.

    So a row that is scaled ends a hair below it, by less than 1e-5 of it in float32; half precision is rounded towards
    zero.
    """
    length = update.length(1.0 if order == "l1" else 2.0)
    double = all(tensor.dtype == torch.float64 for tensor in update.values())
    digits = torch.finfo(torch.float64 if double else torch.float32)
    slack = 4 * digits.eps
    # Subnormal entries lose digits: rounding may make one larger by half of the smallest number there is.
    lost = digits.smallest_normal * slack * update.size ** (1.0 if order == "l1" else 0.5)
    factor = torch.where(length <= norm, 1.0, max(norm * (1 - slack) - lost, 0.0) / length)
    factor = torch.where(factor < digits.smallest_normal, 0.0, factor)
    if bool((factor == 1).all()):
        return update
    return update.map(lambda tensor: _scaled(tensor, per_client(factor, tensor)))


def _scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """The tensor times the factor; in half precision no entry gets larger by rounding."""
    if tensor.dtype not in HALF:
        return tensor * factor.to(tensor.dtype)
    exact = tensor.float() * factor.float()
    rounded = exact.to(tensor.dtype)
    # Read as an integer, the bits of the next float towards zero are one less.
    lower = (rounded.view(torch.int16) - 1).view(tensor.dtype)
    return torch.where(rounded.float().abs() > exact.abs(), lower, rounded)
