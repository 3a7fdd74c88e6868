"""`prepare`: choose how a plan is carried out, and refuse what cannot work before anything is trained or written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fedveil.clients.choose import evaluation_seconds, gradient_seconds, make_engine
from fedveil.clients.engine import Backend, Engine
from fedveil.errors import FedveilError
from fedveil.federation.evaluate import BATCH as EVALUATED_AT_ONCE
from fedveil.federation.plan import Plan
from fedveil.federation.rehearsal import dry_step, sketched_step
from fedveil.federation.schedule import sampled_clients
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Prepared
from fedveil.tasks.inputs import Inputs, map_inputs
from fedveil.tasks.task import Task
from fedveil.workers import Workers

EVALUATION_COMPILED_FROM = 5.0  # predicted seconds


def prepare(
    plan: Plan,
    *,
    backend: Backend = "auto",
    device: str | torch.device = "cpu",
    workers: Workers | None = None,
    engine: Engine | None = None,
    sketched: bool = False,
) -> Prepared:
    """Check a plan, choose its engine and try one step. `train` and `probe` take the result, as often as needed.

    workers: a pool for FedAvg's clients, which must stay open for as long as the result is used.
    engine: that of another plan of the same task, protocol and device, such as one with other defenses. Nothing is
        measured or compiled again then.
    sketched: for a forecast: one step is tried in little time, which is not to be relied on for more.
    """
    plan.check()
    several = workers is not None and _several(workers, plan, device)
    if engine is None:
        count = workers.count if workers is not None and several else 1
        engine = engine_for(plan.task, plan.settings, backend=backend, device=device, workers=count)
    prepared = Prepared(plan, engine, torch.device(device), backend)
    if sketched:
        return replace(prepared, passes=sketched_step(prepared))
    dry_step(prepared)
    if workers is None or not several:
        return prepared
    return replace(prepared, workers=workers, lodged_task=workers.lodge(plan.task))


def engine_for(
    task: Task,
    settings: FederationSettings,
    *,
    backend: Backend = "auto",
    device: str | torch.device = "cpu",
    workers: int = 1,
) -> Engine:
    """The engine that such a run computes its gradients with."""
    model = copy.deepcopy(task.model).to(device).train()
    with _one_thread() if workers > 1 else nullcontext():  # as a worker has, for which code is compiled
        return make_engine(
            model,
            task.loss,
            backend=backend,
            clients=-(-_clients_of_a_round(task, settings) // workers),
            sample=sample_of(task, settings, device),
            steps=settings.rounds * _steps(task, settings),
            perturb=task.perturb,
            one_copy=settings.protocol == "fedsgd",
            processes=workers,
            beside=_evaluation_seconds(task, settings),
        )


def _several(pool: Workers, plan: Plan, device: str | torch.device) -> bool:
    """Whether this run uses the pool's processes; what they cannot do is refused where they were asked for."""
    task, settings = plan.task, plan.settings
    if settings.protocol == "fedsgd":
        if pool.forced:
            raise FedveilError(
                "several worker processes serve FedAvg only: under FedSGD all clients meet the server after every batch"
            )
        return False
    if torch.device(device).type != "cpu":
        if pool.forced:
            raise FedveilError(f"worker processes compute on the processor, not on {device}: use workers=1 there")
        return False
    return pool.worth(lambda: run_seconds(task, settings))


def run_seconds(task: Task, settings: FederationSettings) -> float:
    """Estimated seconds of a run in one process: the gradients of all local steps, and the evaluations.

    From counted arithmetic, never from what was measured before: the same run always makes the same choice.
    """
    gradients = settings.rounds * _steps(task, settings) * _clients_of_a_round(task, settings)
    training = gradient_seconds(task.model, sample_of(task, settings, "cpu"), gradients)
    return training + _evaluation_seconds(task, settings)


def _evaluation_seconds(task: Task, settings: FederationSettings) -> float:
    """Of all evaluations of the model in a run. On small models one takes a third as long as a round."""
    judged = [examples for examples in (task.validation, task.test) if examples is not None and len(examples)]
    if not judged:
        return 0.0
    few = judged[0].batch(range(min(8, len(judged[0]))))[0]  # a language model has a score for every token
    once = evaluation_seconds(copy.deepcopy(task.model).eval(), few, sum(map(len, judged)), EVALUATED_AT_ONCE)
    return (1 + settings.rounds // settings.evaluate_every) * once


def compiles_evaluation(task: Task, settings: FederationSettings) -> bool:
    """Whether compiled evaluations, which take two thirds of the time, save what compiling takes in a few runs."""
    return _evaluation_seconds(task, settings) >= EVALUATION_COMPILED_FROM


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _steps(task: Task, settings: FederationSettings) -> int:
    """Of a client in a round, at most."""
    return settings.local_epochs * -(-max(len(indices) for indices in task.clients) // settings.batch_size)


def _clients_of_a_round(task: Task, settings: FederationSettings) -> int:
    return len(sampled_clients(0, len(task.clients), settings.sampling_rate, 1))


def sample_of(task: Task, settings: FederationSettings, device: str | torch.device) -> tuple[Inputs, Tensor]:
    """A client's batch."""
    inputs, targets = task.train.batch(task.clients[0][: settings.batch_size])
    return map_inputs(lambda tensor: tensor.to(device), inputs), targets.to(device)
