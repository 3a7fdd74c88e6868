"""Per-client gradients beside a plain loop that keeps all gradients. One thread, warm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.tables import Table
from benchmarks.timing import best_times
from fedveil.clients.engine import Backend, Engine
from fedveil.registry import models
from fedveil.streams import Streams
from fedveil.tree import Tree

SETTINGS = [("mlp", 10, 10), ("mlp", 50, 8), ("lenet5", 10, 10), ("lenet", 32, 1), ("lenet", 4, 8)]


def plain_loop(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    kept = []
    for x, y in zip(inputs, targets, strict=True):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kept.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return kept


def measure() -> list[Table]:
    torch.set_num_threads(1)
    table = Table(
        "Client gradients, one thread, warm",
        ["model", "clients × batch", "plain loop (ms)", "loop", "stacked", "compiled"],
        "The three backends as multiples of the plain loop's speed (higher is faster). FedSGD: one set of weights.",
    )
    for name, clients, size in SETTINGS:
        model = models.build(name).build((1, 28, 28), 10)
        inputs, targets = torch.randn(clients, size, 1, 28, 28), torch.randint(0, 10, (clients, size))
        params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, clients)
        streams = Streams.seeded(0, range(clients))
        sides = {"plain": lambda m=model, x=inputs, y=targets: plain_loop(m, x, y)}
        backends: tuple[Backend, ...] = ("loop", "stacked", "compiled")
        for backend in backends:
            engine = Engine(model, functional.cross_entropy, backend=backend)
            engine.chunk = min(engine.chunk, clients)
            sides[backend] = lambda e=engine, p=params, x=inputs, y=targets, s=streams: e.gradient(p, Tree({}), x, y, s)
        times = best_times(sides)
        ratios = [f"{times['plain'] / times[backend]:.2f}×" for backend in backends]
        table.add(name, f"{clients} × {size}", 1000 * times["plain"], *ratios)
    return [table]
