"""`federate`: train a task's model over its clients, under a defense. `train`: the same for a plan that is prepared."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fedveil.clients.engine import Backend, Engine, Tensors
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.errors import FedveilError, one_line
from fedveil.federation.capture import Captured
from fedveil.federation.checkpoint import Machinery, RunState
from fedveil.federation.chunk_workers import ready
from fedveil.federation.client_memory import ClientMemory
from fedveil.federation.compiled_code import evaluation_is_compiled, keep_compiled
from fedveil.federation.evaluate import Evaluator
from fedveil.federation.evaluate_workers import SharedOut
from fedveil.federation.fedavg import fedavg_round
from fedveil.federation.fedsgd import fedsgd_round
from fedveil.federation.history import RoundRecord, Utility
from fedveil.federation.observers import Observer
from fedveil.federation.own_models import own_utilities
from fedveil.federation.perturbation import perturbation
from fedveil.federation.plan import Plan
from fedveil.federation.prepare import prepare
from fedveil.federation.progress import ProgressBar
from fedveil.federation.rehearsal import dry_step
from fedveil.federation.resumable import check_resumable
from fedveil.federation.run_folder import RunFolder
from fedveil.federation.schedule import sampled_clients
from fedveil.federation.server import Server
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Prepared, RoundTally
from fedveil.ownership import owned
from fedveil.progress import Meter, style_for
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
    values: Tensor | None  # one for every test example, whose mean is the test utility: for paired intervals
    early_stopped: bool
    backend: Backend
    captured: list[Captured] = field(default_factory=list)

    def __repr__(self) -> str:
        """Tensors are left out."""
        stopped = ", stopped early" if self.early_stopped else ""
        test = "" if self.utility.test is None else f", test {self.utility.told}"
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
    resume: go on from the checkpoint in `folder`, if there is one; the result equals that of a run that was never
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
        pool = stack.enter_context(opened(workers))
        prepared = prepare(Plan(task, chain, settings, seed), backend=backend, device=device, workers=pool)
        meter.stage(f"training under {chain}" if chain.defenses else "training")
        return train(prepared, folder=folder, resume=resume, observers=(*observers, ProgressBar(meter)))


def train(
    prepared: Prepared,
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    observers: Iterable[Observer] = (),
) -> Run:
    """All rounds of a plan that `prepare` has checked; `folder` and `resume` as in `federate`.

    Runs of one engine do not influence each other.
    """
    if resume and folder is None:
        raise FedveilError("resume needs the folder of the run that is to go on")
    with ExitStack() as stack:
        stack.enter_context(owned(folder))
        kept = None if folder is None else RunFolder(Path(folder), prepared.plan)
        state = kept.load(prepared.device) if kept and resume else None
        if kept and state:
            check_resumable(kept.checkpoint, state, prepared.plan)
        engine = _engine(prepared, state)
        prepared = replace(prepared, engine=engine, observers=(*prepared.observers, *observers))
        if kept and state:
            _try_memories(prepared, state.memory.states, kept.checkpoint)
        if prepared.workers is not None:
            prepared.workers.start(ready)
        keep_compiled(prepared)
        for observer in prepared.observers:
            stack.callback(observer.on_stop)
        run = _rounds(prepared, kept, state)
        for observer in prepared.observers:
            observer.on_finish(run)
        return run


def _engine(prepared: Prepared, state: RunState | None) -> Engine:
    """The engine for this run; one that goes on computes as it did before."""
    if state is None:
        return prepared.engine.again()
    before = state.machinery
    if prepared.backend not in ("auto", before.backend):
        raise FedveilError(
            f"the run was made on the backend {before.backend}: go on with it, or start anew without resume"
        )
    return prepared.engine.again(before.backend, before.chunk)


def _try_memories(prepared: Prepared, states: ClientStates, path: Path) -> None:
    """Only a defense can read what a client remembers: try a step with every kind of memory in the file."""
    chain = prepared.plan.chain
    clients = {states.layout(client): client for client in states.lasting(chain)}
    for client in clients.values():
        try:
            dry_step(prepared, states, client)
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            reason = one_line(error)
            raise FedveilError(
                f"{path} does not fit this run: what client {client} remembers is nothing for {chain} ({reason}); "
                "start anew without resume"
            ) from None


def _rounds(prepared: Prepared, kept: RunFolder | None, state: RunState | None) -> Run:
    """All rounds that are left, and the result."""
    plan = prepared.plan
    evaluator = _evaluator(prepared)
    captured: list[Captured] = []
    if state is None:
        state = _start(prepared, evaluator)
        if kept:
            kept.clear()
    elif kept:
        captured = kept.captured(state.history)
    for observer in prepared.observers:
        observer.on_start(plan.task, plan.settings, list(state.history))
    while len(state.history) < plan.settings.rounds and not state.stopped:
        fresh = _round(prepared, evaluator, state)
        captured += kept.save(state, fresh) if kept else fresh
        for observer in prepared.observers:
            observer.on_round_end(state.history[-1])
    return _finish(prepared, evaluator, state, captured)


def _evaluator(prepared: Prepared) -> Evaluator:
    """Where worker processes train, they evaluate too."""
    compiled, elsewhere = evaluation_is_compiled(prepared), None
    if prepared.workers is not None and prepared.lodged_task is not None:
        elsewhere = SharedOut(prepared.workers, prepared.lodged_task, compiled)
    return Evaluator(prepared.plan.task, prepared.device, compiled=compiled, elsewhere=elsewhere)


def _start(prepared: Prepared, evaluator: Evaluator) -> RunState:
    server, engine = Server.start(prepared), prepared.engine
    utility = evaluator.utility(server.params, server.buffers)
    return RunState(Machinery(engine.backend, engine.chunk), server, ClientMemory(), utility)


def _round(prepared: Prepared, evaluator: Evaluator, state: RunState) -> list[Captured]:
    """One round with its evaluation; returns what was captured in it."""
    plan, settings, server, memory = prepared.plan, prepared.plan.settings, state.server, state.memory
    number = len(state.history) + 1
    clients = sampled_clients(plan.seed, len(plan.task.clients), settings.sampling_rate, number)
    for observer in prepared.observers:
        observer.on_round_start(number, clients)
    began = time.perf_counter()
    tally = ROUNDS[settings.protocol](prepared, server, memory, number, clients)
    if plan.task.buffers == "recalibrated":
        server.buffers = evaluator.recalibrated(server.params, server.buffers)
    seconds = time.perf_counter() - began
    statistics = memory.statistics(server.buffers)
    utility = Utility(metric=state.untrained.metric)
    if settings.evaluates(number):
        beside = own_utilities(prepared, evaluator, server, memory, tally)
        utility = evaluator.utility(server.params, statistics).model_copy(update={"beside": beside})
    record = _record(plan, tally, utility, seconds)
    for line in record.refused.values():
        log.warning("%s: the server goes on without it", line)
    state.history.append(record)
    if settings.patience is not None:
        if state.best is None or utility.standing > state.history[state.best_round - 1].utility.standing:
            state.best_round, state.best = number, (server.params, statistics)
        state.stopped = number - state.best_round >= settings.patience
    return tally.captured


def _record(plan: Plan, tally: RoundTally, utility: Utility, seconds: float) -> RoundRecord:
    moved = [(each.truth.inputs, each.truth.seen) for each in tally.captured]
    return RoundRecord(
        round=tally.number,
        utility=utility,
        train_loss=tally.loss / max(tally.examples, 1),
        seconds=seconds,
        bytes_up=round(tally.bytes_up / len(tally.clients)),
        bytes_down=round(tally.bytes_down / len(tally.clients)),
        clients=tally.clients,
        refused=dict(sorted(tally.refused.items())),
        perturbation=perturbation(moved, plan.task.normalization, plan.task.perturb),
    )


def _finish(prepared: Prepared, evaluator: Evaluator, state: RunState, captured: list[Captured]) -> Run:
    number = state.best_round or len(state.history)
    params, buffers = state.best or (state.server.params, state.memory.statistics(state.server.buffers))
    return Run(
        params=params,
        buffers=buffers,
        untrained=state.untrained,
        history=state.history,
        chosen_round=number,
        utility=state.history[number - 1].utility,
        values=evaluator.values(params, buffers),
        early_stopped=state.stopped,
        backend=prepared.engine.backend,
        captured=captured,
    )
