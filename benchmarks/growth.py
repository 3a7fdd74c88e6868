"""How time and memory grow: with clients, with victims, with the size of images. One thread, a process per point.

Time is the processor's, of a second run in the process: the first pays for set-up. Memory is what the run needs beyond
all that was there before it (libraries, data, model, observed updates): the peak while it runs, less what is resident
when it starts. Flat means that it does not grow with the number of clients or victims. Needs Linux.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import torch
from torch.nn import functional

import fedveil as fv
from benchmarks.attack import make_problem
from benchmarks.processes import printed
from benchmarks.tables import Table
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.matcher import Matcher
from fedveil.attacks.notes import Counter
from fedveil.attacks.scene import Workbench
from fedveil.clients.engine import Engine
from fedveil.memory import keep_freed_memory
from fedveil.registry import models
from fedveil.streams import Streams
from fedveil.tasks.task import build_model
from fedveil.tree import Tree

CLIENTS, OWN, TURNS = (1_000, 3_000, 10_000), 8, 3
VICTIMS, STEPS = (1, 8, 32, 128, 512), 10
SIZES = (28, 56, 112, 224)
Measured = dict[str, float]  # seconds, bytes


def measure() -> list[Table]:
    return [clients(), victims(), sizes()]


def clients() -> Table:
    table = Table(
        f"Growth with clients: one round of all, mlp, {OWN} images each, one thread",
        ["protocol", "clients", "ms per client", "against 1,000", "memory of the round (MB)"],
        f"One step of every client, on the backend stacked, the best of {TURNS} turns. Promised: time per client "
        "within 1.2×, memory flat.",
    )
    for protocol in ("fedavg", "fedsgd"):
        turns = [{count: point("federation", protocol, count) for count in CLIENTS} for _ in range(TURNS)]
        found = {count: min((turn[count] for turn in turns), key=itemgetter("seconds")) for count in CLIENTS}
        for count, one in found.items():
            each = one["seconds"] / count
            ratio = each / (found[CLIENTS[0]]["seconds"] / CLIENTS[0])
            table.add(protocol, f"{count:,}", 1000 * each, f"{ratio:.2f}×", f"{one['bytes'] / 1e6:.0f}")
    return table


def victims() -> Table:
    table = Table(
        "Growth with victims: Inverting Gradients, lenet, 28×28, one thread",
        ["victims", "ms per victim and step", "against 32", "memory of the attack (MB)"],
        f"{STEPS} steps on the backend stacked, in chunks of at most 32 victims.",
    )
    found = {count: point("attack", "lenet", 1, 28, count, STEPS) for count in VICTIMS}
    for count, one in found.items():
        each = one["seconds"] / count / STEPS
        ratio = each / (found[32]["seconds"] / 32 / STEPS)
        table.add(count, 1000 * each, f"{ratio:.2f}×", f"{one['bytes'] / 1e6:.0f}")
    return table


def sizes() -> Table:
    table = Table(
        "Growth with the size of images, three channels, one thread",
        ["what", "model", *(f"{size}×{size}" for size in SIZES), "largest against smallest", "memory at 224 (MB)"],
        "Microseconds per pixel: of one image's gradient, of one victim's attack step (2 victims).",
    )
    kinds: list[tuple[str, str]] = [
        ("gradient", "lenet"),
        ("gradient", "convnet:width=8,norm=group"),
        ("gradient", "resnet18:norm=group"),
        ("attack", "lenet"),
        ("attack", "convnet:width=8,norm=group"),
    ]
    for kind, model in kinds:
        times, memory = [], 0.0
        for size in SIZES:
            one = point("gradient", model, size) if kind == "gradient" else point("attack", model, 3, size, 2, 2)
            images = 1 if kind == "gradient" else 2 * 2
            times.append(1e6 * one["seconds"] / images / size**2)
            memory = one["bytes"] / 1e6
        table.add(kind, model, *times, f"{times[-1] / times[0]:.2f}×", f"{memory:.0f}")
    return table


# ---- one point, in a process of its own -----------------------------------------------------------------


def point(kind: str, *arguments: object) -> Measured:
    found: Measured = printed("benchmarks.growth", kind, *arguments)
    return found


def federation(protocol: str, count: str) -> Measured:
    settings = fv.FederationSettings(protocol=protocol, rounds=1, batch_size=OWN)  # type: ignore[arg-type]
    few, many = random_task(50), random_task(int(count))
    fv.federate(few, None, settings, backend="stacked")
    return measured(lambda: fv.federate(many, None, settings, backend="stacked"))


def random_task(count: int) -> fv.Task:
    images = torch.randint(0, 256, (count * OWN, 1, 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (count * OWN,))
    model = build_model(models.build("mlp"), (1, 28, 28), 10, seed=0)
    owned = list(torch.split(torch.arange(count * OWN), OWN))
    normalization = fv.Normalization((0.5,), (0.25,))
    return fv.Task(model, ((images, labels), (images[:1], labels[:1])), clients=owned, normalization=normalization)


def attack(name: str, channels: str, size: str, count: str, steps: str) -> Measured:
    shape = (int(channels), int(size), int(size))
    problem = make_problem(models.parse(name).build(shape, 10), shape, int(count))
    method = InvertingGradients(steps=int(steps), polish=0, settle=False)
    matcher = Matcher(problem, method.recipe(), Workbench(backend="stacked"))
    some = problem.rows(slice(0, matcher.chunk))
    matcher.recipe = replace(method, steps=1).recipe()
    matcher.run(some, 0, Counter(None, 1))
    matcher.recipe = method.recipe()
    return measured(lambda: matcher.run(problem, 0, Counter(None, 1)))


def gradient(name: str, size: str) -> Measured:
    shape = (3, int(size), int(size))
    model = models.parse(name).build(shape, 10)
    engine = Engine(model, functional.cross_entropy, backend="stacked")
    params = Tree.expand({name: p.detach() for name, p in model.named_parameters()}, 1)
    inputs, labels, streams = torch.randn(1, 1, *shape), torch.randint(0, 10, (1, 1)), Streams.seeded(0, [0])
    engine.gradient(params, Tree({}), inputs, labels, streams)
    return measured(lambda: engine.gradient(params, Tree({}), inputs, labels, streams), repeat=True)


def measured(call: Callable[[], object], *, repeat: bool = False) -> Measured:
    """Processor time of a call (with `repeat`, the best of several short ones) and the memory it needs at its peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the first run freed goes back to the system, and counts again
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    times: list[float] = []
    while not times or (repeat and sum(times) < 0.5):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return {"seconds": min(times), "bytes": float(resident("VmHWM") - before)}


def resident(field: str) -> int:
    """Resident memory in bytes: now (VmRSS) or at its highest (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keep_freed_memory()
    kinds: dict[str, Callable[..., Measured]] = {"federation": federation, "attack": attack, "gradient": gradient}
    print(json.dumps(kinds[sys.argv[1]](*sys.argv[2:])))
