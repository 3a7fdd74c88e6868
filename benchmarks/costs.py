"""What a defense adds to the time of a step or a round, beside the limits that were set. One thread, processor time.

FedEM takes 2N + 1 gradients with weights of each client's own for N inner steps, so that many plain gradients of the
same backend are its measure. Noise is measured by the step on `lenet`, elsewhere by the drawing of its numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import fedveil as fv
from benchmarks.tables import Table
from benchmarks.timing import best_times
from fedveil.clients.engine import Backend, Engine
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.local import Chunk, train_chunk
from fedveil.federation.server import Server
from fedveil.federation.steps import Plan, group_step
from fedveil.streams import Streams
from fedveil.tree import Tree

CLIENTS, SIZE = list(range(4)), 8
BACKENDS: tuple[Backend, ...] = ("loop", "stacked")
NOISE = {"gaussian-noise": ("normal",), "laplace-noise": ("laplace",), "gradient-dropout": ("uniform", "normal")}
FEDEM_STEPS = 15
UPLOAD = ("spm", "pm")


def measure() -> list[Table]:
    torch.set_num_threads(1)
    table = Table(
        "What defenses add to a step or a round, Fashion-MNIST, 4 clients, one thread",
        ["defense", "model", "backend", "against", "times", "limit"],
        f"Processor time, the best of several in turns. A step has batches of {SIZE}, a FedAvg round one "
        "local epoch of 240 images.",
    )
    for model in ("lenet", "mlp"):
        try:
            task = fv.task("fashion-mnist", model=model, limit=960)
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
    params = Tree.expand({name: p.detach() for name, p in task.model.named_parameters()}, len(CLIENTS))
    for name, draws in NOISE.items():
        sides[name] = step(task, engine, name)
        sides[f"draw {name}"] = lambda draws=draws: [
            getattr(Streams.seeded(0, CLIENTS, "costs"), f"{draw}_like")(params) for draw in draws
        ]
    times = best_times(sides, rounds=9, processor=True)
    for name in NOISE:
        if task.model_name == "lenet":
            table.add(
                name, "lenet", engine.backend, "the step without", f"{times[name] / times['plain']:.2f}×", "1.15×"
            )
        else:
            more = (times[name] - times["plain"]) / times[f"draw {name}"]
            table.add(name, task.model_name, engine.backend, "drawing, on top of the step", f"{more:.2f}×", "1.5×")


def fedem(table: Table, task: fv.Task, engine: Engine) -> None:
    plan, server, data = parts(task, engine, "none")
    own = Tree.expand(server.params, len(CLIENTS)).map(torch.clone)
    sides = {
        "fedem": step(task, engine, f"fedem:steps={FEDEM_STEPS}"),
        "plain": lambda: group_step(plan, Chain(), server.states, CLIENTS, own, Tree({}), data, 1, 0),
    }
    times = best_times(sides, rounds=5, processor=True)
    ratio = times["fedem"] / times["plain"]
    limit = 1.2 * (2 * FEDEM_STEPS + 1)
    name = f"fedem, N = {FEDEM_STEPS}"
    table.add(name, task.model_name, engine.backend, "a step with own weights", f"{ratio:.1f}×", f"{limit:.1f}×")


def uploads(table: Table, task: fv.Task, engine: Engine) -> None:
    settings = fv.Federation(protocol="fedavg", batch_size=SIZE)
    sides: dict[str, Callable[[], object]] = {}
    for spec in ("none", *UPLOAD):
        plan = Plan(task, Chain.of(spec), settings, 0, engine)
        server = Server.start(plan)
        chunk = Chunk(CLIENTS, 1, server.params, server.buffers_of(plan, CLIENTS), server.states)
        sides[spec] = lambda plan=plan, chunk=chunk: train_chunk(plan, chunk)
    times = best_times(sides, rounds=5, processor=True)
    for spec in UPLOAD:
        ratio = times[spec] / times["none"]
        table.add(spec, task.model_name, engine.backend, "the FedAvg round without", f"{ratio:.2f}×", "1.15×")


def step(task: fv.Task, engine: Engine, spec: str) -> Callable[[], object]:
    plan, server, data = parts(task, engine, spec)
    params = Tree.expand(server.params, len(CLIENTS))
    return lambda: group_step(plan, plan.chain, server.states.of([]), CLIENTS, params, Tree({}), data, 1, 0)


def parts(task: fv.Task, engine: Engine, spec: str) -> tuple[Plan, Server, tuple[torch.Tensor, torch.Tensor]]:
    plan = Plan(task, Chain.of(spec), fv.Federation(batch_size=SIZE), 0, engine)
    data = plan.read(task.train, [task.clients[client][:SIZE] for client in CLIENTS])
    return plan, Server.start(plan), data  # type: ignore[return-value]
