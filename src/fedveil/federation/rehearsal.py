"""`dry_step`: what would go wrong in a client's first step goes wrong before any training."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedveil.clients.sketch import Sketch
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.errors import FedveilError
from fedveil.federation.plan import Moment
from fedveil.federation.server import Server
from fedveil.federation.steps import Group, Prepared, group_step, refusals
from fedveil.streams import Streams
from fedveil.tree import Tree

FEW = 2  # examples in a sketched step
# Generators that a whole process shares: how their states are read and put back.
GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch's global generator": (torch.get_rng_state, torch.set_rng_state),
    "NumPy's global generator": (np.random.get_state, np.random.set_state),
    "Python's module random": (random.getstate, random.setstate),
}


def sketched_step(prepared: Prepared) -> int:
    """`dry_step` in little time: two examples, every quantity computed once. Returns how many passes it asks for.

    It refuses what cannot run at all, and cannot see what only the right numbers would show.
    """
    sketch = Sketch(prepared.engine)
    with _generators_kept():
        found = _rehearsed(replace(prepared, engine=sketch), ClientStates(), client=0, most=FEW)
    chain = prepared.plan.chain
    if chain.defenses and found.refused:
        raise FedveilError(f"{found.refused}: check the settings of {chain}")
    return sketch.passes


@dataclass(frozen=True)
class Rehearsal:
    """What a trial step yielded."""

    update: Tree
    refused: str  # why a server would not take it; empty where it would
    drawn: frozenset[str]  # the global generators that were moved


def dry_step(prepared: Prepared, states: ClientStates | None = None, client: int = 0) -> None:
    """One client's first step and upload as a trial: a defense that cannot run with this model fails at once.

    states: what clients remember, to see whether their defenses can read it.
    """
    # Where clients are stacked, so they are here; for a compiled engine that alone would import the compiler.
    engine = prepared.engine
    prepared = replace(prepared, engine=engine.again("stacked" if engine.backend == "stacked" else "loop"))
    chain = prepared.plan.chain

    def rehearse(chain: Chain) -> Rehearsal:
        # Each time from the same memory: a step leaves its own in it.
        memory = ClientStates() if states is None or not chain.defenses else states.of([client])
        return _rehearsed(prepared.under(chain), memory, client)

    with _generators_kept():
        first = rehearse(chain)
        if not chain.defenses or (first.refused == "" and not first.drawn and _is_ours(chain)):
            return
        bare = rehearse(Chain())  # a model may draw for itself, and a client have broken data
        if first.drawn - bare.drawn:
            raise _from_outside(chain, rehearse, min(first.drawn - bare.drawn))
        if first.refused and not bare.refused:
            raise FedveilError(f"{first.refused}: check the settings of {chain}")
        # A defense from elsewhere may also draw from a generator that it creates anew each time.
        if not _is_ours(chain) and not first.refused:
            again = rehearse(chain).update
            if not all(_alike(first.update[name], again[name]) for name in first.update):
                raise FedveilError(
                    f"{chain} gives another result each time from equal streams, so that the same seed would not "
                    "give the same result: draw from batch.streams only"
                )


def _is_ours(chain: Chain) -> bool:
    return all(type(defense).__module__.startswith("fedveil.") for defense in chain.defenses)


def _rehearsed(prepared: Prepared, states: ClientStates, client: int, most: int | None = None) -> Rehearsal:
    """What a client would send after one step, and what a trusted server would make of it."""
    before = {name: _fingerprint(read()) for name, (read, _) in GENERATORS.items()}
    plan, settings = prepared.plan, prepared.plan.settings
    number = settings.warmup_rounds + 1
    chain, moment = plan.chain_at(number), Moment(number, 0)
    indices = plan.task.clients[client][: min(settings.batch_size, most or settings.batch_size)]
    plan.compose(client, indices, moment)
    server = Server.start(prepared)
    params, buffers = Tree.expand(server.params, 1), Tree.expand(server.buffers, 1)
    group = Group([client], params, buffers, prepared.read(plan.task.train, [indices]))
    step = group_step(prepared, states, group, moment)
    update, refused = step.result.update, step.refused
    if settings.protocol == "fedavg" and not refused:
        change = update * -settings.lr_at(number)
        end = Moment(number, "upload")
        sent = params + change if settings.upload == "weights" else change
        update = chain.upload(sent, prepared.batch(group, end), states.gather([client], chain))
        refused = refusals([client], update, params, str(end))
    if chain.aggregates:
        streams = Streams.seeded(plan.seed, [client], "rehearsal", "server")
        update = chain.aggregate(update, plan.weights([client]), streams)
    drawn = {name for name, (read, _) in GENERATORS.items() if _fingerprint(read()) != before[name]}
    return Rehearsal(update, refused.get(client, ""), frozenset(drawn))


def _from_outside(chain: Chain, rehearse: Callable[[Chain], Rehearsal], generator: str) -> FedveilError:
    """The error for a draw that no seed repeats, naming the defense where it can be told."""
    alone = [defense for defense in chain.defenses if generator in rehearse(Chain((defense,))).drawn]
    name = alone[0].name if alone else str(chain)
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
    """Leave the process's generators as they are; one that was not moved is not touched, for other threads use it."""
    states = {name: read() for name, (read, _) in GENERATORS.items()}
    try:
        yield
    finally:
        for name, (read, write) in GENERATORS.items():
            if _fingerprint(read()) != _fingerprint(states[name]):
                write(states[name])
