"""What a defense adds to the time of a step or a round, beside the limits that were set. One thread, processor time.

FedEM takes 2N + 1 gradients with weights of each client's own for N inner steps, so that many plain gradients of the
same backend are its measure. Noise is measured by the step on `lenet`, elsewhere by the drawing of its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import truediv

import torch

import fedveil as fv
from benchmarks.tables import Table
from benchmarks.timing import turns, typical
from fedveil.clients.engine import Backend, Engine
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.errors import FedveilError
from fedveil.federation.client_memory import ClientMemory
from fedveil.federation.local import Chunk, train_chunk
from fedveil.federation.plan import Moment, Plan
from fedveil.federation.server import Server
from fedveil.federation.steps import Group, Prepared, group_step
from fedveil.streams import Streams
from fedveil.tree import Tree

CLIENTS, SIZE, IMAGES = list(range(4)), 8, 600
BACKENDS: tuple[Backend, ...] = ("loop", "stacked")
# What each draws for an update of so many entries.
NOISE: dict[str, Callable[[Streams, int], object]] = {
    "gaussian-noise": lambda streams, size: streams.normal(size),
    "laplace-noise": lambda streams, size: streams.laplace(size),
    "gradient-dropout": lambda streams, size: (streams.chance(0.8, size), streams.normal(size)),
}
FEDEM_STEPS = 15
UPLOAD = ("spm", "pm")


def measure() -> list[Table]:
    torch.set_num_threads(1)
    table = Table(
        "What defenses add to a step or a round, Fashion-MNIST, 4 clients, one thread",
        ["defense", "model", "backend", "against", "times", "limit"],
        f"Processor time, the median over many short turns. A step has batches of {SIZE}, a FedAvg round one "
        f"local epoch of {IMAGES} images.",
    )
    for model in ("lenet", "mlp"):
        try:
            task = fv.task("fashion-mnist", model=model, limit=4 * IMAGES)
        except FedveilError as error:
            print(f"costs is left out: {error}")
            return []
        for backend in BACKENDS:
            engine = Engine(task.model, task.loss, backend=backend, chunk=len(CLIENTS))
            noise(table, task, engine)
            fedem(table, task, engine)
            uploads(table, task, engine)
    return [table]


def noise(table: Table, task: fv.Task, engine: Engine) -> None:
    """A step under noise, against the step without; or its surplus against the drawing of the numbers."""
    sides: dict[str, Callable[[], object]] = {"plain": step(task, engine, "none")}
    size = sum(parameter.numel() for parameter in task.model.parameters())
    for name, draw in NOISE.items():
        sides[name] = step(task, engine, name)
        sides[f"draw {name}"] = lambda draw=draw: draw(Streams.seeded(0, CLIENTS, "costs"), size)
    times = turns(sides, rounds=100, least=0.004, processor=True)
    for name in NOISE:
        if task.model_name == "lenet":
            ratio = typical(truediv, times[name], times["plain"])
            table.add(name, "lenet", engine.backend, "the step without", f"{ratio:.2f}×", "1.15×")
        else:
            more = typical(
                lambda with_noise, plain, draw: (with_noise - plain) / draw,
                times[name],
                times["plain"],
                times[f"draw {name}"],
            )
            table.add(name, task.model_name, engine.backend, "drawing, on top of the step", f"{more:.2f}×", "1.5×")


def fedem(table: Table, task: fv.Task, engine: Engine) -> None:
    prepared, group = parts(task, engine, "none")
    own = replace(group, params=group.params.map(torch.clone))
    sides = {
        "fedem": step(task, engine, f"fedem:steps={FEDEM_STEPS}"),
        "plain": lambda: group_step(prepared, ClientStates(), own, Moment(1, 0)),
    }
    times = turns(sides, rounds=25, least=0.004, processor=True)
    ratio = typical(truediv, times["fedem"], times["plain"])
    limit = 1.2 * (2 * FEDEM_STEPS + 1)
    name = f"fedem, N = {FEDEM_STEPS}"
    table.add(name, task.model_name, engine.backend, "a step with own weights", f"{ratio:.1f}×", f"{limit:.1f}×")


def uploads(table: Table, task: fv.Task, engine: Engine) -> None:
    sides = {spec: local_round(task, engine, spec) for spec in ("none", *UPLOAD)}
    times = turns(sides, rounds=25, least=0.004, processor=True)
    for spec in UPLOAD:
        ratio = typical(truediv, times[spec], times["none"])
        table.add(spec, task.model_name, engine.backend, "the FedAvg round without", f"{ratio:.2f}×", "1.15×")


def local_round(task: fv.Task, engine: Engine, spec: str) -> Callable[[], object]:
    prepared = Prepared(Plan(task, Chain.of(spec), fv.FederationSettings(protocol="fedavg", batch_size=SIZE)), engine)
    server, memory = Server.start(prepared), ClientMemory()
    chunk = Chunk(CLIENTS, 1, server.params, memory.buffers_of(CLIENTS, server.buffers), memory.states)
    return lambda: train_chunk(prepared, chunk)


def step(task: fv.Task, engine: Engine, spec: str) -> Callable[[], object]:
    prepared, group = parts(task, engine, spec)
    return lambda: group_step(prepared, ClientStates(), group, Moment(1, 0))


def parts(task: fv.Task, engine: Engine, spec: str) -> tuple[Prepared, Group]:
    prepared = Prepared(Plan(task, Chain.of(spec), fv.FederationSettings(batch_size=SIZE)), engine)
    data = prepared.read(task.train, [task.clients[client][:SIZE] for client in CLIENTS])
    params = Tree.expand(Server.start(prepared).params, len(CLIENTS))
    return prepared, Group(CLIENTS, params, Tree({}), data)
