"""The compiled code of a run, made before its first round: each piece in a worker of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedveil.clients.choose import keep_gradient
from fedveil.clients.engine import ResolvedBackend
from fedveil.federation.chunk_workers import engine_of
from fedveil.federation.evaluate_workers import evaluator_of
from fedveil.federation.prepare import compiles_evaluation, sample_of
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Prepared
from fedveil.tasks.task import Task
from fedveil.workers import Lodged, lodged_value


@dataclass(frozen=True)
class _Job:
    """A piece of code, as it is asked of a worker."""

    what: Literal["gradient", "evaluation"]
    task: Lodged
    settings: FederationSettings
    backend: ResolvedBackend
    size: int  # of whole chunks


def evaluation_is_compiled(prepared: Prepared) -> bool:
    """Whether this run evaluates by compiled code."""
    return prepared.engine.backend == "compiled" and compiles_evaluation(prepared.plan.task, prepared.plan.settings)


def keep_compiled(prepared: Prepared) -> None:
    """Load the code that worker processes run, or make it: at the same time, and before they wait for it."""
    workers, task, engine = prepared.workers, prepared.lodged_task, prepared.engine
    if engine.backend != "compiled" or workers is None or task is None:
        return
    common = (task, prepared.plan.settings, engine.backend, engine.chunk)
    jobs = [_Job("gradient", *common)]
    if evaluation_is_compiled(prepared):
        jobs.append(_Job("evaluation", *common))
    for _ in workers.map(_keep, jobs):
        pass


def _keep(job: _Job) -> None:
    task: Task = lodged_value(job.task)
    if job.what == "evaluation":
        params = {name: tensor.detach() for name, tensor in task.model.named_parameters() if tensor.requires_grad}
        evaluator_of(job.task, compiled=True).keep_compiled(params, dict(task.model.named_buffers()))
        return
    engine = engine_of(job.task, job.backend, job.size)
    keep_gradient(engine, sample_of(task, job.settings, "cpu"), job.settings.protocol == "fedsgd")
