"""Evaluation in worker processes: each takes every n-th batch. Two of one thread beat two threads of one process."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.clients.engine import Tensors
from fedveil.federation.evaluate import Evaluator, Found, Part
from fedveil.tasks.task import Task
from fedveil.workers import Lodged, Workers, lodged_value


@dataclass(frozen=True)
class _Job:
    """Some batches, as they travel to a worker."""

    task: Lodged
    compiled: bool
    parts: tuple[Part, ...]
    params: Tensors
    buffers: Tensors
    first: int
    step: int


@dataclass(frozen=True)
class SharedOut:
    """Evaluates in the processes of a pool; the batches and their order are those of one process."""

    workers: Workers
    task: Lodged
    compiled: bool

    def __call__(self, parts: tuple[Part, ...], params: Tensors, buffers: Tensors) -> list[list[Found]]:
        """What each part is judged by, batch by batch."""
        count = self.workers.count
        jobs = (_Job(self.task, self.compiled, parts, params, buffers, first, count) for first in range(count))
        shares = list(self.workers.map(_work, jobs))
        return [_dealt([share[number] for share in shares]) for number in range(len(parts))]


def _dealt(shares: list[list[Found]]) -> list[Found]:
    """Back in order: a batch of each in turn.

    >>> _dealt([[("a",), ("c",)], [("b",)]])  # type: ignore[list-item]
    [('a',), ('b',), ('c',)]
    """
    longest = max(map(len, shares))
    return [share[number] for number in range(longest) for share in shares if number < len(share)]


_evaluators: dict[tuple[Lodged, bool], Evaluator] = {}  # kept in a worker over rounds and runs


def evaluator_of(lodged: Lodged, compiled: bool) -> Evaluator:
    """A worker's own evaluator of a task."""
    if (lodged, compiled) not in _evaluators:
        task: Task = lodged_value(lodged)
        _evaluators[lodged, compiled] = Evaluator(task, compiled=compiled)
    return _evaluators[lodged, compiled]


def _work(job: _Job) -> list[list[Found]]:
    evaluator = evaluator_of(job.task, job.compiled)
    return evaluator.batches(job.parts, job.params, job.buffers, job.first, job.step)
