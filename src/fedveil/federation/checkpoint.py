"""Checkpoints between rounds: a run that was killed goes on from the last one as if nothing had happened.

A checkpoint is one safetensors file with a JSON header: the weights, buffers and server momentum, the best model so
far, the clients' local buffers and what their defenses remember over rounds, the history, and a description of the
whole configuration, which a resumed run must have too. Randomness needs no saving: it is keyed by round and step.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedveil.clients.behavior import behavior
from fedveil.clients.engine import Tensors
from fedveil.defenses.chain import Chain, ClientStates, States
from fedveil.errors import FedveilError
from fedveil.federation.client_memory import ClientMemory
from fedveil.federation.history import RoundRecord, Utility
from fedveil.federation.plan import Plan
from fedveil.federation.server import Server
from fedveil.fields import field_values
from fedveil.tasks.task import Task
from fedveil.tensorfile import Header, grouped, prefixed, read_tensors, write_tensors

CHECKPOINT = "fedveil-checkpoint"
VERSION = 2
PARTS = {"params", "buffers", "velocity", "local", "state", "best_params", "best_buffers"}


class CheckpointHeader(Header):
    """The JSON header of a checkpoint."""

    configuration: dict[str, Any]
    backend: Literal["loop", "stacked", "compiled"]
    chunk: int
    untrained: Utility
    history: list[RoundRecord]
    best_round: int
    stopped: bool


@dataclass(frozen=True)
class Machinery:
    """What computed the gradients. A resumed run uses the same, or its last bits would differ."""

    backend: Literal["loop", "stacked", "compiled"]
    chunk: int


@dataclass
class RunState:
    """How far a run has come."""

    machinery: Machinery
    server: Server
    memory: ClientMemory
    untrained: Utility
    history: list[RoundRecord] = field(default_factory=list)
    best_round: int = 0
    best: tuple[Tensors, Tensors] | None = None  # weights and statistics of the best round, under early stopping
    stopped: bool = False

    def to(self, device: torch.device) -> None:
        """Move everything to the device that the run goes on with."""
        server = self.server
        server.params, server.buffers = _moved(server.params, device), _moved(server.buffers, device)
        server.velocity = _moved(server.velocity, device)
        self.memory.buffers = {client: _moved(row, device) for client, row in self.memory.buffers.items()}
        if self.best is not None:
            self.best = _moved(self.best[0], device), _moved(self.best[1], device)


def configuration(plan: Plan) -> dict[str, Any]:
    """Everything that a run's result depends on, as plain data."""
    task, loss = plan.task, plan.task.loss
    members = hashlib.sha256()
    for indices in task.clients:
        members.update(len(indices).to_bytes(8, "little"))
        members.update(indices.cpu().contiguous().numpy().tobytes())
    described = {
        "task": task.description,
        "data": task.data_hash,
        "clients": members.hexdigest(),
        "initial model": task.model_hash,
        "loss": getattr(loss, "__name__", type(loss).__name__),
        "behavior of model and loss": _behavior(task),
        "defense": str(plan.chain),
        "settings": field_values(plan.settings),
        "seed": plan.seed,
    }
    return {name: _plain(value) for name, value in described.items()}


def _behavior(task: Task) -> str:
    """What the model and its loss make of the first examples: names say little about a user's own code."""
    inputs, targets = task.train.batch(task.clients[0][:2])
    row = {**dict(task.model.named_parameters()), **dict(task.model.named_buffers())}
    return behavior(task.model, task.loss, row, inputs, targets)


def save_checkpoint(path: Path, state: RunState, chain: Chain, described: dict[str, Any]) -> None:
    """Write a checkpoint in place of the last one."""
    server, memory = state.server, state.memory
    tensors = prefixed("params", server.params) | prefixed("buffers", server.buffers)
    tensors |= prefixed("velocity", server.velocity)
    for client, row in memory.buffers.items():
        tensors |= prefixed(f"local/{client}", row)
    for client, states in memory.states.lasting(chain).items():
        for position, remembered in enumerate(states):
            tensors |= prefixed(f"state/{client}/{position}", remembered)
    if state.best is not None:
        tensors |= prefixed("best_params", state.best[0]) | prefixed("best_buffers", state.best[1])
    header = CheckpointHeader(
        format=CHECKPOINT,
        version=VERSION,
        configuration=described,
        backend=state.machinery.backend,
        chunk=state.machinery.chunk,
        untrained=state.untrained,
        history=state.history,
        best_round=state.best_round,
        stopped=state.stopped,
    )
    write_tensors(path, header, tensors)


def load_checkpoint(path: Path, chain: Chain, described: dict[str, Any]) -> RunState:
    """Read a checkpoint of this configuration; one of another is refused, naming what differs."""
    header, tensors = read_tensors(path, CheckpointHeader, CHECKPOINT, VERSION)
    changed = differences(header.configuration, described)
    if changed:
        raise FedveilError(
            f"{path} belongs to another run: {'; '.join(changed)}. Choose another folder, or start anew without resume"
        )
    if header.sha256 is None:
        raise FedveilError(f"{path} is damaged: its hash is missing; start anew without resume")
    groups = grouped(tensors)
    unknown = sorted(groups.keys() - PARTS)
    if unknown:
        raise FedveilError(f"{path} is not a valid checkpoint: it holds {unknown[0]!r:.60}, which none has")
    server = Server(groups.get("params", {}), groups.get("buffers", {}), groups.get("velocity", {}))
    try:
        own = {_number(name): row for name, row in grouped(groups.get("local", {})).items()}
        memory = ClientMemory(ClientStates(_states(groups.get("state", {}), chain)), own)
    except ValueError as error:
        raise FedveilError(f"{path} is not a valid checkpoint: {error}") from None
    best = (groups["best_params"], groups.get("best_buffers", {})) if "best_params" in groups else None
    if best is None and "best_buffers" in groups:
        raise FedveilError(f"{path} is not a valid checkpoint: it holds a best model's buffers without its weights")
    return RunState(
        Machinery(header.backend, header.chunk),
        server,
        memory,
        header.untrained,
        list(header.history),
        header.best_round,
        best,
        header.stopped,
    )


def _moved(row: Tensors, device: torch.device) -> Tensors:
    return {name: tensor.to(device) for name, tensor in row.items()}


def _states(tensors: dict[str, Tensor], chain: Chain) -> dict[int, States]:
    lasting = [str(position) for position, defense in enumerate(chain.defenses) if defense.state_scope == "run"]
    found: dict[int, States] = {}
    for name, tensor in tensors.items():
        client, _, rest = name.partition("/")
        position, _, key = rest.partition("/")
        if position not in lasting or not key:
            raise ValueError(f"the memory {name!r:.60} is of no defense here that remembers anything over rounds")
        found.setdefault(_number(client), chain.new_states())[int(position)][key] = tensor
    return found


def _number(name: str) -> int:
    """A client's number as `str` writes it."""
    if not re.fullmatch("0|[1-9][0-9]{0,9}", name):
        raise ValueError(f"{name!r:.60} is not the number of a client")
    return int(name)


def differences(saved: Any, current: Any, name: str = "") -> list[str]:
    """What differs between two configurations, one line each."""
    if isinstance(saved, dict) and isinstance(current, dict):
        keys = [*saved, *(key for key in current if key not in saved)]
        return [line for key in keys for line in differences(saved.get(key), current.get(key), f"{name} {key}".strip())]
    return [] if saved == current else [f"{name} was {_short(saved)}, is now {_short(current)}"]


def _short(value: Any) -> str:
    text = str(value)
    text = text if text.isprintable() else repr(value)
    return f"{text[:12]}…" if len(text) == 64 else text[:200]  # a hash; whatever else a file may hold


def _plain(value: Any) -> Any:
    """The value as JSON gives it back: tuples are lists there."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
