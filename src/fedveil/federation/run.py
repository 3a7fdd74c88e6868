"""`federate`: train a task's model over its clients, under a defense."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fedveil.clients.choose import gradient_seconds, make_engine
from fedveil.clients.engine import Backend, Engine, Tensors
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.errors import FedveilError
from fedveil.federation.capture import Captured
from fedveil.federation.checkpoint import Machinery, Progress, configuration, load_checkpoint, save_checkpoint
from fedveil.federation.evaluate import Evaluator
from fedveil.federation.fedavg import fedavg_round
from fedveil.federation.fedsgd import fedsgd_round
from fedveil.federation.history import RoundRecord, Utility
from fedveil.federation.observers import Observer
from fedveil.federation.own_models import own_utilities
from fedveil.federation.perturbation import perturbation
from fedveil.federation.progress import ProgressBar
from fedveil.federation.rehearsal import dry_step
from fedveil.federation.resumable import check_resumable
from fedveil.federation.schedule import sampled_clients
from fedveil.federation.server import Server
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Plan
from fedveil.ownership import owned
from fedveil.progress import Meter, style_for
from fedveil.tasks.inputs import Inputs, map_inputs
from fedveil.tasks.task import Task
from fedveil.workers import Workers, opened

log = logging.getLogger("fedveil")

ROUNDS = {"fedsgd": fedsgd_round, "fedavg": fedavg_round}


@dataclass(frozen=True, eq=False)
class Run:
    """What a federation came to."""

    params: Tensors  # of the last round, or of the best one under early stopping
    buffers: Tensors  # the statistics that belong to them
    untrained: Utility  # before the first round
    history: list[RoundRecord]
    chosen_round: int  # whose model this is
    utility: Utility  # of this model
    correct: Tensor | None  # for every test example whether this model gets it right: for paired intervals
    early_stopped: bool
    backend: Backend
    captured: list[Captured] = field(default_factory=list)

    def __repr__(self) -> str:
        """Tensors are left out."""
        stopped = ", stopped early" if self.early_stopped else ""
        test = "" if self.utility.test is None else f", test {self.utility.metric} {self.utility.test:.1%}"
        captured = f", {len(self.captured)} captured update{'s' * (len(self.captured) > 1)}" if self.captured else ""
        return f"Run(round {self.chosen_round} of {len(self.history)}{stopped}{test}, {self.backend}{captured})"


def federate(
    task: Task,
    defense: Defense | Chain | Sequence[Defense] | str | None,
    settings: FederationSettings,
    *,
    seed: int = 0,
    backend: Backend = "auto",
    device: str | torch.device = "cpu",
    observers: Iterable[Observer] = (),
    folder: Path | str | None = None,
    resume: bool = False,
    workers: int | Workers = 1,
    progress: bool | None = None,
) -> Run:
    """Train a task's model over its clients. The task's own module is left as it is.

    folder: where a checkpoint is kept after every round, and the captured updates: `captures/` holds what the server
        saw, `truths/` the clients' side of it. One run at a time has a folder: another is refused.
    resume: go on from the checkpoint in `folder`, if there is one; the outcome equals that of a run that was never
        interrupted, to the last bit.
    workers: train the clients of a FedAvg round in so many processes, or in those of a pool that serves several runs.
        A script that asks for more than one needs its main part under `if __name__ == "__main__":`.
    progress: show rounds and the time left; by default on a terminal and in a notebook only.
    """
    chain = Chain.of(defense)
    if resume and folder is None:
        raise FedveilError("resume needs the folder of the run that is to go on")
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(style_for(progress)))
        stack.enter_context(owned(folder))
        store = None if folder is None else Store(Path(folder), chain, configuration(task, chain, settings, seed))
        found = store.load(torch.device(device)) if store and resume else None
        if store and found:
            check_resumable(store.checkpoint, *found, task, chain, settings, seed)
        machinery = found[1] if found else None
        pool = stack.enter_context(opened(workers))
        plan = checked_plan(
            task, chain, settings, seed=seed, backend=backend, device=device, workers=pool, machinery=machinery
        )
        plan = replace(plan, observers=(*observers, ProgressBar(meter)))
        if store and found:
            _try_memories(plan, found[0].server.states, store.checkpoint)
        meter.stage(f"training under {chain}" if chain.defenses else "training")
        for observer in plan.observers:
            stack.callback(observer.on_stop)
        run = _train(plan, store, found[0] if found else None)
        for observer in plan.observers:
            observer.on_finish(run)
        return run


def checked_plan(
    task: Task,
    chain: Chain,
    settings: FederationSettings,
    *,
    seed: int,
    backend: Backend,
    device: str | torch.device,
    workers: Workers,
    machinery: Machinery | None = None,
) -> Plan:
    """The plan of a run. What cannot work is refused, while nothing is written yet."""
    several = _several(workers, task, settings, device)
    count = workers.count if several else 1
    engine = engine_for(task, settings, backend=backend, device=device, machinery=machinery, workers=count)
    plan = Plan(task, chain, settings, seed, engine, torch.device(device))
    plan.check()
    dry_step(plan)
    return replace(plan, workers=workers, lodged_task=workers.lodge(task)) if several else plan


def _several(pool: Workers, task: Task, settings: FederationSettings, device: str | torch.device) -> bool:
    """Whether this run uses the pool's processes; what they cannot do is refused where they were asked for."""
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
    gradients = settings.rounds * _steps(task, settings) * _clients_of_a_round(task, settings)
    return pool.worth(lambda: gradient_seconds(task.model, _sample(task, settings, "cpu"), gradients))


def _steps(task: Task, settings: FederationSettings) -> int:
    """Of a client in a round, at most."""
    return settings.local_epochs * -(-max(len(places) for places in task.clients) // settings.batch_size)


def _clients_of_a_round(task: Task, settings: FederationSettings) -> int:
    return len(sampled_clients(0, len(task.clients), settings.sampling_rate, 1))


def _sample(task: Task, settings: FederationSettings, device: str | torch.device) -> tuple[Inputs, Tensor]:
    """A client's batch."""
    inputs, targets = task.train.batch(task.clients[0][: settings.batch_size])
    return map_inputs(lambda tensor: tensor.to(device), inputs), targets.to(device)


def _try_memories(plan: Plan, states: ClientStates, path: Path) -> None:
    """What a client remembers, only its defense can read: a step for nothing with every kind of memory in a file."""
    clients = {states.layout(client): client for client in states.lasting(plan.chain)}
    for client in clients.values():
        try:
            dry_step(plan, states, client)
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise FedveilError(
                f"{path} does not fit this run: what client {client} remembers is nothing for {plan.chain} ({reason}); "
                "start anew without resume"
            ) from None


def _train(plan: Plan, store: Store | None, progress: Progress | None) -> Run:
    """All rounds that are left, and the outcome."""
    settings, engine, evaluator = plan.settings, plan.engine, Evaluator(plan)
    captured: list[Captured] = []
    if progress is None:
        progress = _start(plan, evaluator)
        if store:
            store.clear()
    elif store:
        captured = store.captured(settings, progress.history)
    for observer in plan.observers:
        observer.on_start(plan.task, settings, list(progress.history))
    while len(progress.history) < settings.rounds and not progress.stopped:
        fresh = _round(plan, evaluator, progress)
        if store:
            fresh = store.save(progress, fresh, Machinery(engine.backend, engine.chunk))
        captured += fresh
        for observer in plan.observers:
            observer.on_round_end(progress.history[-1])
    return _finish(plan, evaluator, progress, captured)


def engine_for(
    task: Task,
    settings: FederationSettings,
    *,
    backend: Backend = "auto",
    device: str | torch.device = "cpu",
    machinery: Machinery | None = None,
    workers: int = 1,
) -> Engine:
    """The engine that such a run computes its gradients with; `machinery` is that of a run to go on with."""
    model = copy.deepcopy(task.model).to(device).train()
    if machinery:
        if backend not in ("auto", machinery.backend):
            raise FedveilError(
                f"the run was made on the backend {machinery.backend}: go on with it, or start anew without resume"
            )
        return Engine(model, task.loss, backend=machinery.backend, chunk=machinery.chunk, perturb=task.perturb)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if workers > 1 else threads)  # as in a worker, for what is timed to choose a backend
        return make_engine(
            model,
            task.loss,
            backend=backend,
            clients=-(-_clients_of_a_round(task, settings) // workers),
            sample=_sample(task, settings, device),
            steps=settings.rounds * _steps(task, settings),
            perturb=task.perturb,
            one_copy=settings.protocol == "fedsgd",
        )
    finally:
        torch.set_num_threads(threads)


def _start(plan: Plan, evaluator: Evaluator) -> Progress:
    server = Server.start(plan)
    return Progress(server, evaluator.utility(server.params, evaluator.statistics(server)))


def _round(plan: Plan, evaluator: Evaluator, progress: Progress) -> list[Captured]:
    """One round with its evaluation; returns what was captured in it."""
    settings, server = plan.settings, progress.server
    number = len(progress.history) + 1
    clients = sampled_clients(plan.seed, len(plan.task.clients), settings.sampling_rate, number)
    for observer in plan.observers:
        observer.on_round_start(number, clients)
    began = time.perf_counter()
    outcome = ROUNDS[settings.protocol](plan, server, number, clients)
    if plan.task.buffers == "recalibrated":
        server.buffers = evaluator.recalibrated(server.params, server.buffers)
    seconds = time.perf_counter() - began
    statistics = evaluator.statistics(server)
    utility = Utility(metric=progress.untrained.metric)
    if settings.evaluates(number):
        beside = own_utilities(plan, evaluator, server, number, clients)
        utility = evaluator.utility(server.params, statistics).model_copy(update={"beside": beside})
    moved = [(each.truth.inputs, each.truth.seen) for each in outcome.captured]
    record = RoundRecord(
        round=number,
        utility=utility,
        train_loss=outcome.loss / max(outcome.examples, 1),
        seconds=seconds,
        bytes_up=round(outcome.bytes_up / len(clients)),
        bytes_down=round(outcome.bytes_down / len(clients)),
        clients=clients,
        refused=dict(sorted(outcome.refused.items())),
        perturbation=perturbation(moved, plan.task.normalization, plan.task.perturb),
    )
    for line in record.refused.values():
        log.warning("%s: the server goes on without it", line)
    progress.history.append(record)
    if settings.patience is not None:
        if progress.best is None or _validation(record) > _validation(progress.history[progress.best_round - 1]):
            progress.best_round, progress.best = number, (server.params, statistics)
        progress.stopped = number - progress.best_round >= settings.patience
    return outcome.captured


def _validation(record: RoundRecord) -> float:
    return record.utility.validation or 0.0


def _finish(plan: Plan, evaluator: Evaluator, progress: Progress, captured: list[Captured]) -> Run:
    number = progress.best_round or len(progress.history)
    params, buffers = progress.best or (progress.server.params, evaluator.statistics(progress.server))
    return Run(
        params=params,
        buffers=buffers,
        untrained=progress.untrained,
        history=progress.history,
        chosen_round=number,
        utility=progress.history[number - 1].utility,
        correct=evaluator.correct(plan.task.test, params, buffers),
        early_stopped=progress.stopped,
        backend=plan.engine.backend,
        captured=captured,
    )


class Store:
    """The folder of a run: its checkpoint and its captures."""

    def __init__(self, folder: Path, chain: Chain, described: dict[str, object]) -> None:
        self.folder = folder
        self._chain = chain
        self._described = described

    @property
    def checkpoint(self) -> Path:
        """The file of the checkpoint."""
        return self.folder / "checkpoint.safetensors"

    def load(self, device: torch.device) -> tuple[Progress, Machinery] | None:
        """How far the run has come, or None if there is no checkpoint yet."""
        if not self.checkpoint.exists():
            return None
        progress, machinery = load_checkpoint(self.checkpoint, self._chain, self._described)
        progress.to(device)
        return progress, machinery

    def save(self, progress: Progress, fresh: list[Captured], machinery: Machinery) -> list[Captured]:
        """Keep a round; returns its captures as they lie in their files, so that they take no memory.

        Captures go first: once the checkpoint tells of the round they are all there.
        """
        stored = [captured.saved(*self._paths(captured.round, captured.client)) for captured in fresh]
        save_checkpoint(self.checkpoint, progress, self._chain, machinery, self._described)
        return stored

    def captured(self, settings: FederationSettings, history: list[RoundRecord]) -> list[Captured]:
        """What was captured in the rounds before a resume."""
        found = []
        for record in history:
            if record.round in settings.record_rounds:
                for client in record.clients[: settings.record_clients]:
                    paths = self._paths(record.round, client)
                    if client in record.refused and not paths[0].exists():
                        continue  # nothing of it was taken, so nothing was captured
                    stored = Captured.stored(client, record.round, *paths)
                    _ = stored.capture, stored.truth  # a missing or damaged file is told before training goes on
                    found.append(stored)
        return found

    def clear(self) -> None:
        """Remove what an earlier run left, so that nothing of it is taken for this one's."""
        self.checkpoint.unlink(missing_ok=True)
        for kind in ("captures", "truths"):
            for path in (self.folder / kind).glob("round-*-client-*.safetensors"):
                path.unlink()

    def _paths(self, number: int, client: int) -> tuple[Path, Path]:
        """Where a client's captured update of a round lies, and the truth behind it."""
        name = f"round-{number:04}-client-{client:04}.safetensors"
        for kind in ("captures", "truths"):
            (self.folder / kind).mkdir(exist_ok=True)
        return self.folder / "captures" / name, self.folder / "truths" / name
