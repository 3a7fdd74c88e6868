"""Small networks that attacks train: plain dicts of tensors, drawn from streams, and one way to train them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedveil.progress import Report
from fedveil.streams import Streams

Weights = dict[str, Tensor]
Decay = Literal["cosine", "step"]
CHECKS = 20  # times that a network is judged on what was held out while it is trained


def dense(name: str, inside: int, outside: int, streams: Streams, gain: float = 1.0) -> Weights:
    """A layer from one width to another: normal weights that keep the size of what goes through, and zero biases."""
    drawn = streams.fold(name).normal(outside, inside)[0]
    return {f"{name}.weight": drawn * (gain / math.sqrt(inside)), f"{name}.bias": torch.zeros(outside)}


def through(weights: Weights, name: str, values: Tensor) -> Tensor:
    """Values (..., inside) through a dense layer."""
    return torch.nn.functional.linear(values, weights[f"{name}.weight"], weights[f"{name}.bias"])


@dataclass(frozen=True, eq=False)
class Course:
    """What is made small over how many steps, and by what the outcome is judged."""

    loss: Callable[[Weights], Tensor]  # of fresh examples at every call
    held_out: Callable[[Weights], float]  # the error on examples that are never trained on
    steps: int
    lr: float  # Adam's rate at the start
    decay: Decay = "cosine"  # step: to a tenth at three quarters, as LTI was published
    report: Report | None = None  # is told (steps done, in all)

    def rate(self, step: int) -> float:
        """Adam's rate at a step."""
        if self.decay == "step":
            return self.lr * (0.1 if 4 * step >= 3 * self.steps else 1.0)
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def trained(weights: Weights, course: Course) -> Weights:
    """The weights with the least error on what was held out, of those met on the way; the first ones count too."""
    live = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    optimizer = torch.optim.Adam(list(live.values()), lr=course.lr)
    marks = {round(course.steps * (part + 1) / CHECKS) for part in range(CHECKS)}
    best, least = weights, _judged(course, weights)
    for step in range(course.steps):
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step)
        optimizer.zero_grad()
        course.loss(live).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step + 1 in marks:
            now = {name: tensor.detach().clone() for name, tensor in live.items()}
            error = _judged(course, now)
            if error < least:
                best, least = now, error
        if course.report is not None:
            course.report(step + 1, course.steps)
    return best


def _judged(course: Course, weights: Weights) -> float:
    with torch.no_grad():
        error = course.held_out(weights)
    return error if math.isfinite(error) else math.inf
