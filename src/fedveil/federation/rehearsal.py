"""`dry_step`: what goes wrong in a client's first step goes wrong before any training."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.server import Server
from fedveil.federation.steps import Plan, group_step, require_finite
from fedveil.streams import Streams
from fedveil.tree import Tree

# Generators that a whole process shares: how their states are read and put back.
GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch's global generator": (torch.get_rng_state, torch.set_rng_state),
    "NumPy's global generator": (np.random.get_state, np.random.set_state),
    "Python's module random": (random.getstate, random.setstate),
}


def dry_step(plan: Plan) -> None:
    """One client's first step and upload for nothing: what this model or seed cannot run under says so at once."""
    engine = copy.copy(plan.engine)
    engine.backend = "loop" if engine.backend == "loop" else "stacked"  # one step is not worth compiling for
    plan = replace(plan, engine=engine)
    with _generators_kept():
        first, drawn = _watched(plan, plan.chain)
        if drawn and (drawn := drawn - _watched(plan, Chain())[1]):  # a model may draw for itself
            raise _from_outside(plan, min(drawn))
        # What is not of this package may also draw from a generator that it makes anew each time.
        if any(not type(defense).__module__.startswith("fedveil.") for defense in plan.chain.defenses):
            again, _ = _watched(plan, plan.chain)
            if not all(_alike(first[name], again[name]) for name in first):
                raise FedveilError(
                    f"{plan.chain} gives another result each time from equal streams, so that the same seed would not "
                    "give the same result: draw from batch.streams only"
                )


def _rehearsed(plan: Plan, chain: Chain) -> Tree:
    """What the first client would send after one step, and a trusted server make of it."""
    settings, number = plan.settings, plan.settings.warmup_rounds + 1
    places = plan.task.clients[0][: settings.batch_size]
    plan.compose(chain, 0, places, ("round", number, "step", 0))
    server = Server.start(plan)
    data = plan.read(plan.task.train, [places])
    params, buffers = Tree.expand(server.params, 1), server.buffers_of(plan, [0])
    update = group_step(plan, chain, server.states, [0], params, buffers, data, number, 0).shared.update
    if settings.protocol == "fedavg":
        change = update * -settings.lr_at(number)
        batch = plan.batch([0], params, buffers, data, ("round", number, "upload"), chain)
        sent = params + change if settings.upload == "weights" else change
        update = chain.upload(sent, batch, server.states.gather([0], chain))
        require_finite([0], update, number, "the upload")
    if chain.aggregates:
        update = chain.aggregate(update, plan.weights([0]), Streams.seeded(plan.seed, [0], "rehearsal", "server"))
    return update


def _watched(plan: Plan, chain: Chain) -> tuple[Tree, set[str]]:
    """What a rehearsal yields, and the global generators that it moved."""
    before = {name: _fingerprint(read()) for name, (read, _) in GENERATORS.items()}
    found = _rehearsed(plan, chain)
    return found, {name for name, (read, _) in GENERATORS.items() if _fingerprint(read()) != before[name]}


def _from_outside(plan: Plan, generator: str) -> FedveilError:
    """The error for a draw that no seed repeats, naming the defense where it can be told."""
    alone = [defense for defense in plan.chain.defenses if generator in _watched(plan, Chain((defense,)))[1]]
    name = alone[0].name if alone else str(plan.chain)
    return FedveilError(
        f"{name} draws from {generator}, so that the same seed would not give the same result: draw from batch.streams"
    )


def _alike(first: torch.Tensor, again: torch.Tensor) -> bool:
    """Equal but for rounding, which some devices do in any order."""
    scale = float(first.abs().max()) if first.numel() else 0.0
    return torch.allclose(first.double(), again.double(), rtol=1e-4, atol=1e-6 * scale)


def _fingerprint(state: Any) -> bytes:
    return pickle.dumps(state.numpy() if isinstance(state, torch.Tensor) else state)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the process's generators as they are."""
    states = {name: read() for name, (read, _) in GENERATORS.items()}
    try:
        yield
    finally:
        for name, (_, write) in GENERATORS.items():
            write(states[name])
