"""Whether a checkpoint can be of the run that is to go on. Its hash says only that nobody changed it by accident."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedveil.clients.engine import MOST_STACKED
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.errors import FedveilError
from fedveil.federation.checkpoint import Machinery, RunState
from fedveil.federation.history import RoundRecord, Utility
from fedveil.federation.plan import Plan
from fedveil.federation.schedule import sampled_clients
from fedveil.tasks.measures import measure
from fedveil.tasks.task import Task


def check_resumable(path: Path, state: RunState, plan: Plan) -> None:
    """Refuse a checkpoint whose contents this run cannot have written, naming the first thing that is wrong."""
    for wrong in (
        *_wrong_machinery(state.machinery, plan.task),
        *_wrong_tensors(state, plan),
        *_wrong_states(state.memory.states, plan.chain, len(plan.task.clients)),
        *_wrong_history(state, plan),
        *_wrong_best(state, plan),
    ):
        raise FedveilError(f"{path} does not fit this run: {wrong}; start anew without resume")


def _wrong_machinery(machinery: Machinery, task: Task) -> Iterator[str]:
    most = max(len(task.clients), MOST_STACKED)
    if not 1 <= machinery.chunk <= most:
        yield f"it stacks {machinery.chunk} clients at a time, not 1 to {most}"


def _wrong_tensors(state: RunState, plan: Plan) -> Iterator[str]:
    server, own, task, settings = state.server, state.memory.buffers, plan.task, plan.settings
    params, buffers = _own(task)
    yield from _misfits("weights", server.params, params)
    yield from _misfits("buffers", server.buffers, buffers)
    moves = settings.protocol == "fedsgd" and settings.momentum > 0
    yield from _misfits("momentum", server.velocity, params if moves else {})
    if own and task.buffers != "local":
        yield "it holds clients' own buffers, and the task has none"
    for client, row in own.items():
        yield from _wrong_client(client, len(task.clients))
        yield from _misfits(f"client {client}'s buffers", row, buffers)


def _own(task: Task) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trained parameters and the buffers of the task's model."""
    params: dict[str, Tensor] = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
    return params, dict(task.model.named_buffers())


def _misfits(
    what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, types: bool = True
) -> Iterator[str]:
    for name in sorted(found.keys() ^ expected.keys()):
        yield f"{name!r:.60} is {'missing from' if name in expected else 'no part of'} the {what}"
    for name, tensor in found.items():
        own = expected.get(name)
        if own is None:
            continue
        if tensor.shape != own.shape:
            yield f"{name} has shape {tuple(tensor.shape)} in the {what}, not {tuple(own.shape)}"
        if types and tensor.dtype != own.dtype:
            yield f"{name} is {tensor.dtype} in the {what}, not {own.dtype}"
        yield from _not_finite(f"{name} in the {what}", tensor)


def _not_finite(what: str, tensor: Tensor) -> Iterator[str]:
    # Types of 8 bits have no such test, and no model or defense here has them.
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() == 1):
        yield f"{what} is {tensor.dtype}"
    elif not bool(torch.isfinite(tensor).all()):
        yield f"{what} holds NaN or infinity"


def _wrong_client(client: int, count: int) -> Iterator[str]:
    if not 0 <= client < count:
        yield f"it tells of client {client}, and they are 0 to {count - 1}"


def _wrong_states(states: ClientStates, chain: Chain, clients: int) -> Iterator[str]:
    """Memories that no client or no defense of the chain can have."""
    for client, kept in states.lasting(chain).items():
        yield from _wrong_client(client, clients)
        for remembered in kept:
            for name, tensor in remembered.items():
                yield from _not_finite(f"{name!r:.60} that client {client} remembers", tensor)


def _wrong_history(state: RunState, plan: Plan) -> Iterator[str]:
    history, clients, settings = state.history, len(plan.task.clients), plan.settings
    if not 1 <= len(history) <= settings.rounds:
        yield f"it tells of {len(history)} rounds, not 1 to {settings.rounds}"
        return
    yield from _wrong_utility("the untrained model", state.untrained, state.untrained.metric)
    for number, record in enumerate(history, 1):
        if record.round != number:
            yield f"round {number} is called {record.round}"
        elif record.clients != sampled_clients(plan.seed, clients, settings.sampling_rate, number):
            yield f"the clients of round {number} are others"
        yield from _wrong_numbers(number, record)
        yield from _wrong_utility(f"round {number}", record.utility, state.untrained.metric)


def _wrong_numbers(number: int, record: RoundRecord) -> Iterator[str]:
    moved = record.perturbation.model_dump(exclude={"unit"}) if record.perturbation else {}
    if not math.isfinite(record.train_loss):
        yield f"the loss of round {number} is {record.train_loss}"
    for name, value in {**record.model_dump(include={"seconds", "bytes_up", "bytes_down"}), **moved}.items():
        if not 0 <= value < 2**62:
            yield f"{name} of round {number} is {value!s:.60}"


def _wrong_utility(where: str, utility: Utility, metric: str) -> Iterator[str]:
    if utility.metric != metric:
        yield f"{where} is measured by {utility.metric}, others by {metric}"
    most = 1 + 1e-9 if measure(metric).share else math.inf  # a mean may be off by its rounding
    for value in (utility.validation, utility.test, utility.train, *utility.beside.values()):
        if value is not None and not -1e-9 <= value <= most:
            yield f"a utility of {where} is {value!s:.60}, no {'fraction' if most < math.inf else 'error'}"


def _wrong_best(state: RunState, plan: Plan) -> Iterator[str]:
    """The best round and whether to stop follow from the history."""
    best, stopped, settings = 0, False, plan.settings
    if settings.patience is not None:
        values = [record.utility.standing for record in state.history]
        best = values.index(max(values)) + 1
        stopped = len(values) - best >= settings.patience
    if state.best_round != best:
        yield f"its best round is {state.best_round}, and by its history {best or 'none'}"
    if state.stopped != stopped:
        yield f"it has {'' if state.stopped else 'not '}stopped early, against its history"
    if (state.best is not None) != (best > 0):
        yield "its best model is missing" if best else "it holds a best model, and none was looked for"
    if state.best is not None:
        params, buffers = _own(plan.task)
        yield from _misfits("best weights", state.best[0], params)
        yield from _misfits("best buffers", state.best[1], buffers, types=False)  # means of integers are none
