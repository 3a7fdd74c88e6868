"""Per-client gradients beside a plain loop that keeps all gradients. One thread, warm."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from operator import truediv

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.tables import Table
from benchmarks.timing import turns, typical
from fedveil.clients.choose import make_engine
from fedveil.clients.engine import BACKENDS, Engine
from fedveil.registry import models
from fedveil.streams import Streams
from fedveil.tree import Tree

SETTINGS = [("mlp", 10, 10), ("mlp", 50, 8), ("lenet5", 10, 10), ("lenet", 32, 1), ("lenet", 4, 8)]
CLIENTS, SIZES = (1, 2, 4, 10, 50), (1, 8, 64)


def plain_loop(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    kept = []
    for x, y in zip(inputs, targets, strict=True):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kept.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return kept


def measure() -> list[Table]:
    torch.set_num_threads(1)
    return [each_backend(), chosen_backend()]


def each_backend() -> Table:
    table = Table(
        "Client gradients, one thread, warm",
        ["model", "clients × batch", "plain loop (ms)", *BACKENDS[1:]],
        "The three backends as multiples of the plain loop's speed (higher is faster), the median of many short turns "
        "in processor time. FedSGD: one set of weights.",
    )
    for name, clients, size in SETTINGS:
        case = Case(name, clients, size)
        sides = {"plain": case.plain}
        for backend in BACKENDS[1:]:
            sides[backend] = case.ours(Engine(case.model, functional.cross_entropy, backend=backend))
        times = turns(sides, 40, 0.02, processor=True)
        ratios = [f"{typical(truediv, times['plain'], times[backend]):.2f}×" for backend in BACKENDS[1:]]
        table.add(name, f"{clients} × {size}", 1000 * statistics.median(times["plain"]), *ratios)
    return table


def chosen_backend() -> Table:
    table = Table(
        "The backend that is chosen for short work, over a grid of clients and batch sizes, one thread",
        ["model", "clients", *(f"batch {size}" for size in SIZES)],
        "As multiples of the plain loop's speed (higher is faster); never compiled.",
    )
    for name in ("mlp", "lenet5", "lenet"):
        for clients in CLIENTS:
            cells = []
            for size in SIZES:
                case = Case(name, clients, size)
                sample = case.inputs[0], case.targets[0]
                engine = make_engine(case.model, functional.cross_entropy, clients=clients, sample=sample, steps=1)
                times = turns({"plain": case.plain, "ours": case.ours(engine)}, 40, 0.01, processor=True)
                cells.append(f"{typical(truediv, times['plain'], times['ours']):.2f}× ({engine.backend})")
            table.add(name, clients, *cells)
    return table


class Case:
    """Clients with random batches for a model."""

    def __init__(self, name: str, clients: int, size: int) -> None:
        self.model = models.build(name).build((1, 28, 28), 10)
        self.inputs, self.targets = torch.randn(clients, size, 1, 28, 28), torch.randint(0, 10, (clients, size))
        self.weights = {n: p.detach() for n, p in self.model.named_parameters()}

    def plain(self) -> object:
        return plain_loop(self.model, self.inputs, self.targets)

    def ours(self, engine: Engine) -> Callable[[], object]:
        """All gradients, a chunk of clients at a time as a round takes them."""
        engine.chunk = min(engine.chunk, len(self.targets))
        chunks = []
        for start in range(0, len(self.targets), engine.chunk):
            inputs, targets = (part[start : start + engine.chunk] for part in (self.inputs, self.targets))
            streams = Streams.seeded(0, range(start, start + len(targets)))
            chunks.append((Tree.expand(self.weights, len(targets)), Tree({}), inputs, targets, streams))

        def run() -> object:
            return [engine.gradient(*chunk).update for chunk in chunks]

        return run
