"""What `Guard` costs in anyone's own loop, in plain steps, and Opacus beside it. One thread, processor time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from operator import truediv
from pathlib import Path

import torch
from torch.nn import functional

import fedveil as fv
from benchmarks.peers.environment import python_of
from benchmarks.tables import Table
from benchmarks.timing import turns, typical
from fedveil.registry import models

SHAPE, CLASSES = (1, 28, 28), 10
# The defense, the size of a batch, and the rounds to time: slow ones need few.
ROWS = (("none", 8, 100), ("gaussian-noise", 8, 50), ("clip", 8, 50), ("soteria", 8, 2), ("dp-sgd", 64, 5))


def measure() -> list[Table]:
    torch.set_num_threads(1)
    table = Table(
        "A step through Guard, lenet, one thread",
        ["defense", "batch", "plain steps"],
        "A plain step is `loss.backward()`. Processor time, the median over turns; noise is drawn from the operating "
        "system. Opacus runs in an environment of its own, beside its own plain step.",
    )
    for defense, size, rounds in ROWS:
        table.add(defense, size, f"{guarded(defense, size, rounds):.2f}")
    table.add("dp-sgd by Opacus 1.6", 64, f"{opacus():.2f}")
    return [table]


def guarded(defense: str, size: int, rounds: int) -> float:
    """A protected step in plain steps of the same model."""
    torch.manual_seed(0)
    model = models.build("lenet").build(SHAPE, CLASSES)
    inputs, targets = torch.randn(size, *SHAPE), torch.randint(0, CLASSES, (size,))
    guard = fv.Guard(model, functional.cross_entropy, defense, batch_size=size)

    def plain() -> None:
        model.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()

    def protected() -> None:
        model.zero_grad()
        guard.backward(inputs, targets)

    sides: dict[str, Callable[[], object]] = {"plain": plain, "protected": protected}
    times = turns(sides, rounds, least=0.01, processor=True)
    return typical(truediv, times["protected"], times["plain"])


def opacus() -> float:
    """The same of Opacus's DP-SGD, batch 64."""
    script = Path(__file__).parent / "peers" / "opacus_side.py"
    done = subprocess.run([python_of("opacus"), script], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["plain steps"])
