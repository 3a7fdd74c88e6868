"""What `Guard` costs in anyone's own loop, in plain steps, and Opacus beside it. One thread, processor time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from operator import truediv
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedveil as fv
from benchmarks.peers import private_models
from benchmarks.peers.environment import python_of
from benchmarks.tables import Table
from benchmarks.timing import turns, typical
from fedveil.registry import models

SHAPE, CLASSES = (1, 28, 28), 10
# The defense, the size of a batch, and the rounds to time: slow ones need few.
ROWS = (("none", 8, 100), ("gaussian-noise", 8, 50), ("clip", 8, 50), ("soteria", 8, 2))


def measure() -> list[Table]:
    torch.set_num_threads(1)
    table = Table(
        "A step through Guard, lenet, one thread",
        ["defense", "batch", "plain steps"],
        "A plain step is `loss.backward()`. Processor time, the median over turns; noise is drawn from the operating "
        "system.",
    )
    for defense, size, rounds in ROWS:
        torch.manual_seed(0)
        model = models.build("lenet").build(SHAPE, CLASSES)
        batch = torch.randn(size, *SHAPE), torch.randint(0, CLASSES, (size,))
        table.add(defense, size, f"{guarded(model, *batch, defense, rounds):.2f}")
    return [table, beside_opacus()]


def beside_opacus() -> Table:
    """DP-SGD of both, each in plain steps of the same model in the same process."""
    table = Table(
        "A step of DP-SGD, batch 64, one thread, in plain steps",
        ["model", "Guard", "Opacus 1.6"],
        "As above. Opacus runs in an environment of its own beside its own plain step; its noise is from torch's "
        "generator.",
    )
    theirs = opacus()
    for name, make in private_models.MODELS.items():
        torch.manual_seed(0)
        ours = guarded(make(), *private_models.batch(name), "dp-sgd", rounds=15)
        table.add(name, f"{ours:.2f}", f"{theirs[name]:.2f}")
    return table


def guarded(model: nn.Module, inputs: Tensor, targets: Tensor, defense: str, rounds: int) -> float:
    """A protected step in plain steps of the same model."""
    size = len(targets)
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


def opacus() -> dict[str, float]:
    """The same of Opacus's DP-SGD, by model."""
    script = Path(__file__).parent / "peers" / "opacus_side.py"
    done = subprocess.run([python_of("opacus"), script], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
