"""Chunks of clients trained in worker processes, or here where there are none."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedveil.clients.engine import Engine, ResolvedBackend
from fedveil.defenses.chain import Chain
from fedveil.federation.local import Chunk, Trained, train_chunk
from fedveil.federation.observers import Observer
from fedveil.federation.plan import Plan
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Prepared
from fedveil.tasks.task import Task
from fedveil.workers import Lodged, lodged_value, tick


@dataclass(frozen=True)
class Job:
    """A chunk, and the plan it is trained by, as it travels to a worker."""

    task: Lodged  # where the workers find it
    chain: Chain
    settings: FederationSettings
    seed: int
    backend: ResolvedBackend
    size: int  # of whole chunks
    chunk: Chunk


def trained_chunks(prepared: Prepared, chunks: Iterable[Chunk], number: int) -> Iterator[Trained]:
    """Each chunk after its local round, in order."""
    if prepared.workers is None or prepared.lodged_task is None:
        yield from (train_chunk(prepared, chunk) for chunk in chunks)
        return
    steps = itertools.count()

    def told() -> None:
        step = next(steps)
        for observer in prepared.observers:
            observer.on_step(number, step)

    plan, engine, task = prepared.plan, prepared.engine, prepared.lodged_task
    jobs = (Job(task, plan.chain, plan.settings, plan.seed, engine.backend, engine.chunk, chunk) for chunk in chunks)
    yield from prepared.workers.map(_work, jobs, told)


def ready(_: None) -> None:
    """What a process does first: import this module, which takes as long as a round."""


class _Ticking(Observer):
    def on_step(self, number: int, step: int) -> None:
        tick()


# Kept in a worker over rounds and runs: compiling is expensive.
_engines: dict[tuple[Lodged, ResolvedBackend, int], Engine] = {}


def engine_of(lodged: Lodged, backend: ResolvedBackend, size: int) -> Engine:
    """A worker's own engine for a task."""
    key = (lodged, backend, size)
    if key not in _engines:
        task: Task = lodged_value(lodged)
        _engines[key] = Engine(task.model.train(), task.loss, backend=backend, chunk=size, perturb=task.perturb)
    return _engines[key]


def _work(job: Job) -> Trained:
    plan = Plan(lodged_value(job.task), job.chain, job.settings, job.seed)
    engine = engine_of(job.task, job.backend, job.size)
    return train_chunk(Prepared(plan, engine, observers=(_Ticking(),)), job.chunk)
