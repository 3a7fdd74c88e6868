"""Targets as variables of a search: free numbers, from which targets of each kind are made."""

from __future__ import annotations

from torch import Tensor

from fedveil.attacks.problem import Problem
from fedveil.errors import FedveilError
from fedveil.streams import Streams


def check_searchable(problem: Problem) -> None:
    """Refuse targets that cannot be searched for."""
    if problem.form.kind == "tokens" or (problem.form.kind == "class" and problem.classes is None):
        raise FedveilError("labels cannot be optimized: the number of classes is not known")


def fresh_targets(problem: Problem, streams: Streams) -> Tensor:
    """Where a search starts: (V, B, C) scores of classes, (V, B, L) of labels, or (V, B, ...) numbers."""
    shape = (problem.classes or 0,) if problem.form.kind == "class" else problem.form.shape
    return streams.normal(problem.batch_size, *shape).to(problem.like)


def as_targets(problem_kind: str, free: Tensor) -> Tensor:
    """What the loss is given: chances of the classes, chances of each label, or the numbers themselves."""
    if problem_kind == "class":
        return free.softmax(-1)
    return free.sigmoid() if problem_kind == "labels" else free


def settled_targets(problem_kind: str, free: Tensor) -> Tensor:
    """What they come to: a class number, zeros and ones, or the numbers."""
    if problem_kind == "class":
        return free.argmax(-1)
    return (free > 0).to(free.dtype) if problem_kind == "labels" else free
