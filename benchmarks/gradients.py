"""Per-client gradients beside a plain loop that keeps all gradients. One thread, warm."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from itertools import product
from operator import truediv

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.processes import printed
from benchmarks.tables import Table
from benchmarks.timing import turns, typical
from fedveil.clients.choose import make_engine
from fedveil.clients.engine import BACKENDS, Engine
from fedveil.memory import keep_freed_memory
from fedveil.registry import models
from fedveil.streams import Streams
from fedveil.tree import Tree

SETTINGS = [("mlp", 10, 10), ("mlp", 50, 8), ("lenet5", 10, 10), ("lenet", 32, 1), ("lenet", 4, 8)]
MODELS, CLIENTS, SIZES, PROCESSES = ("mlp", "lenet5", "lenet"), (1, 2, 4, 10, 50), (1, 8, 64), 5
HOW = (
    f"the median of many short turns in processor time and of {PROCESSES} processes: where memory comes to lie decides "
    "some percent for as long as a process lives."
)


def plain_loop(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    kept = []
    for x, y in zip(inputs, targets, strict=True):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kept.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return kept


def measure() -> list[Table]:
    backends = Table(
        "Client gradients, one thread, warm",
        ["model", "clients × batch", "plain loop (ms)", *BACKENDS[1:]],
        f"The three backends as multiples of the plain loop's speed (higher is faster), {HOW} FedSGD: one set of "
        "weights.",
    )
    chosen = Table(
        "The backend that is chosen for short work, over a grid of clients and batch sizes, one thread",
        ["model", "clients", *(f"batch {size}" for size in SIZES)],
        f"As multiples of the plain loop's speed (higher is faster), {HOW} Never compiled.",
    )
    found = [printed("benchmarks.gradients") for _ in range(PROCESSES)]
    for row, (name, clients, size) in enumerate(SETTINGS):
        plain, *ratios = (
            statistics.median(column) for column in zip(*(one["backends"][row] for one in found), strict=True)
        )
        backends.add(name, f"{clients} × {size}", 1000 * plain, *(f"{ratio:.2f}×" for ratio in ratios))
    for row, (name, clients) in enumerate(product(MODELS, CLIENTS)):
        chosen.add(name, clients, *map(middle, zip(*(one["grid"][row] for one in found), strict=True)))
    return [backends, chosen]


def middle(found: Iterable[tuple[float, str]]) -> str:
    """The median of some processes, and the backends that they chose."""
    speeds, backends = zip(*found, strict=True)
    return f"{statistics.median(speeds):.2f}× ({' or '.join(sorted(set(backends)))})"


def each_backend(name: str, clients: int, size: int) -> list[float]:
    """Seconds of the plain loop, and each backend as a multiple of its speed."""
    case = Case(name, clients, size)
    sides = {"plain": case.plain}
    for backend in BACKENDS[1:]:
        sides[backend] = case.ours(Engine(case.model, functional.cross_entropy, backend=backend))
    times = turns(sides, 16, 0.02, processor=True)
    ratios = [typical(truediv, times["plain"], times[backend]) for backend in BACKENDS[1:]]
    return [statistics.median(times["plain"]), *ratios]


def chosen_backend(name: str, clients: int, size: int) -> tuple[float, str]:
    """The chosen backend's speed as a multiple of the plain loop's, and its name."""
    case = Case(name, clients, size)
    sample = case.inputs[0], case.targets[0]
    engine = make_engine(case.model, functional.cross_entropy, clients=clients, sample=sample, steps=1)
    times = turns({"plain": case.plain, "ours": case.ours(engine)}, 16, 0.01, processor=True)
    return typical(truediv, times["plain"], times["ours"]), engine.backend


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()
    grid = [[chosen_backend(*row, size) for size in SIZES] for row in product(MODELS, CLIENTS)]
    print(json.dumps({"grid": grid, "backends": [each_backend(*setting) for setting in SETTINGS]}))
