"""Where the time goes in the three main workloads, and what share of the processor's arithmetic they reach. One thread.

The limit is what one core does in a large matrix product, measured beside. The arithmetic of a workload is that of its
convolutions and matrix products, counted on a plain run without any stacking.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import fedveil as fv
from benchmarks.attack import make_problem, plain_attack
from benchmarks.gradients import plain_loop
from benchmarks.tables import Table
from benchmarks.timing import best_times
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.matcher import Matcher
from fedveil.attacks.notes import Counter
from fedveil.attacks.scene import Workbench
from fedveil.clients.engine import BACKENDS, Backend, Engine
from fedveil.defenses.chain import Chain
from fedveil.federation.client_memory import ClientMemory
from fedveil.federation.local import Chunk, train_chunk
from fedveil.federation.plan import Plan
from fedveil.federation.server import Server
from fedveil.federation.steps import Prepared
from fedveil.registry import models
from fedveil.streams import Streams
from fedveil.tree import Tree

KINDS = {
    "products": ("conv", "mm", "linear", "matmul", "einsum", "mkldnn"),
    "copies": ("copy", "clone", "contiguous", "cat", "stack", "reshape", "fill", "zero", "index", "gather", "scatter"),
}


def measure() -> list[Table]:
    torch.set_num_threads(1)
    limit = arithmetic_limit()
    table = Table(
        "Where the time goes, one thread",
        ["workload", "backend", "ms", "share of the limit", "products", "copies", "element by element", "the rest"],
        f"The limit is {limit / 1e9:.0f} GFLOP/s, a matrix product of 1024 × 1024. Shares of time by kind of work: "
        "generated kernels count as element by element; the rest is Python and dispatch.",
    )
    for name, sides, operations in (
        gradients(),
        local_rounds(),
        attacks("lenet", 32),
        attacks("resnet18:norm=group", 1),
    ):
        times = best_times(sides, rounds=3)
        for backend, call in sides.items():
            share = operations / times[backend] / limit
            table.add(name, backend, 1000 * times[backend], f"{share:.0%}", *shares_of_time(call))
    return [table]


def arithmetic_limit() -> float:
    """Operations per second of a large matrix product."""
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / best_times({"product": lambda: a @ b})["product"]


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def shares_of_time(call: Callable[[], object]) -> list[str]:
    call()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
    found = dict.fromkeys(("products", "copies", "element by element"), 0.0)
    for event in profiler.key_averages():
        kind = next((kind for kind, words in KINDS.items() if any(word in event.key for word in words)), None)
        found[kind or "element by element"] += event.self_cpu_time_total / 1e6
    found["the rest"] = max(0.0, seconds - sum(found.values()))
    return [f"{part / seconds:.0%}" for part in found.values()]


Workload = tuple[str, dict[str, Callable[[], object]], int]


def gradients() -> Workload:
    """One gradient of each of 10 clients with a batch of 10."""
    model = models.build("lenet5").build((1, 28, 28), 10)
    inputs, targets = torch.randn(10, 10, 1, 28, 28), torch.randint(0, 10, (10, 10))
    params = Tree.expand({name: p.detach() for name, p in model.named_parameters()}, 10)
    streams = Streams.seeded(0, range(10))
    sides: dict[str, Callable[[], object]] = {}
    for backend in BACKENDS[1:]:
        engine = Engine(model, functional.cross_entropy, backend=backend, chunk=10)
        sides[backend] = lambda e=engine: e.gradient(params, Tree({}), inputs, targets, streams)
    return "gradients of 10 × 10 images, lenet5", sides, counted(lambda: plain_loop(model, inputs, targets))


def local_rounds() -> Workload:
    """The local round of 5 clients: 6 steps of batch 10, with all that a step needs."""
    task = fv.Task(
        models.build("lenet5").build((1, 28, 28), 10),
        tuple((torch.randn(size, 1, 28, 28), torch.arange(size) % 10) for size in (300, 10, 10)),  # type: ignore[arg-type]
        clients=5,
    )
    settings = fv.FederationSettings(protocol="fedavg", batch_size=10)
    sides: dict[str, Callable[[], object]] = {}
    for backend in BACKENDS[1:]:
        engine = Engine(task.model, task.loss, backend=backend, chunk=5)
        prepared = Prepared(Plan(task, Chain(), settings), engine)
        server, memory = Server.start(prepared), ClientMemory()
        chunk = Chunk(list(range(5)), 1, server.params, memory.buffers_of(range(5), server.buffers), memory.states)
        sides[backend] = lambda prepared=prepared, chunk=chunk: train_chunk(prepared, chunk)
    inputs, targets = task.train.batch(range(300))
    batches = inputs.reshape(30, 10, 1, 28, 28), targets.reshape(30, 10)
    return "a local round of 5 clients, lenet5", sides, counted(lambda: plain_loop(task.model, *batches))


def attacks(name: str, victims: int) -> Workload:
    """6 steps of Inverting Gradients on pictures of 32 × 32."""
    shape, steps = (3, 32, 32), 6
    model = models.parse(name).build(shape, 10)
    problem = make_problem(model, shape, victims)
    # A run evaluates the objective once more at its end.
    recipe = InvertingGradients(steps=steps - 1, restarts=1, polish=0, settle=False).recipe()
    sides: dict[str, Callable[[], object]] = {}
    backends: tuple[Backend, ...] = ("stacked", "compiled")
    for backend in backends:
        matcher = Matcher(problem, recipe, Workbench(backend=backend))
        sides[backend] = lambda m=matcher: m.run(problem, 0, Counter(None, 1))
    assert problem.labels is not None
    label, target = problem.labels[0], list(problem.target.row(0).values())
    one = counted(lambda: plain_attack(model, target, label, shape, 1))
    return f"{steps} steps of an attack, victims: {victims}, {name}", sides, steps * problem.count * one
