"""Inverting Gradients beside breaching 0.1.2 and a plain autograd loop, on CIFAR-10 images.

Breaching runs in an environment of its own (`benchmarks.peers.environment`), which is made the first time. Needs
CIFAR-10's files under FEDVEIL_DATA; without them this part is left out, and says so.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.breaching_process import Breaching, breaching_side
from benchmarks.peers.environment import python_of
from benchmarks.shared_victims import Workers, our_workers, ours_whole_machine, plain, read_victims, write_victims
from benchmarks.tables import Table
from fedveil.errors import FedveilError
from fedveil.leakage.metrics import psnr
from fedveil.registry import datasets

ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """One model: how much of it is timed, and how far it is attacked to see what both recover."""

    model: str  # as fedveil names it
    peer_model: str  # as `peers/breaching_side.py` names it
    victims: int
    steps: int
    quality_victims: int
    quality_steps: int
    total_variations: tuple[float, ...]  # on both sides: breaching's own, and fedveil's


def lenet() -> list[Table]:
    return measure(Case("lenet", "lenet", 32, 100, 8, 1000, (0.2, 0.01, 1e-5)))


def resnet18() -> list[Table]:
    return measure(Case("resnet18:norm=group", "resnet18", 4, 20, 4, 60, (0.2,)))


def measure(case: Case) -> list[Table]:
    """Both sides' speed on a model, and what they recover."""
    try:
        datasets.build("cifar10").load()
        python_of("breaching")
    except FedveilError as error:
        print(f"beside_breaching is left out: {error}")
        return []
    speed = Table(
        f"Inverting Gradients beside breaching 0.1.2, CIFAR-10, {case.model}",
        ["victims × steps", "threads", "breaching (ms per victim and step)", "plain loop", "fedveil", "cold"],
        "As multiples of breaching's speed in the same row (higher is faster), warm, the sides in turns. With all "
        "threads each side is as it comes: breaching with torch's own number of threads, one victim after another; "
        "fedveil with a process for every core. Cold: fedveil's first run, with an empty compile cache.",
    )
    quality = Table(
        f"What both recover with the same settings from the same starts, {case.model}",
        ["victims", "steps", "total variation", "PSNR of breaching (dB)", "of fedveil", "fedveil − breaching"],
        "Mean over the victims by fedveil's metric, and the difference with the standard error of its mean. Known "
        "labels, signed Adam at 0.1 with decay, box, one try.",
    )
    with contextlib.ExitStack() as stack:
        victims = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "victims.npz"
        write_victims(victims, case.model, case.peer_model, max(case.victims, case.quality_victims))
        for threads in (1, None):
            peer = stack.enter_context(breaching_side(victims, threads=threads))
            ours = stack.enter_context(our_workers(threads or os.cpu_count() or 1, victims))
            add_speed(speed, case, victims, peer, ours)
        for total_variation in case.total_variations:
            add_quality(quality, case, victims, total_variation, peer, ours)
    return [speed, quality]


def add_speed(table: Table, case: Case, path: Path, peer: Breaching, ours: Workers) -> None:
    """One row: breaching, a plain loop on one thread, and fedveil, warm and cold."""
    victims, weight = range(case.victims), case.total_variations[0]
    with empty_compile_cache(), our_workers(len(ours), path) as fresh:
        cold = seconds(lambda: ours_whole_machine(fresh, path, victims, case.steps, weight))
    sides: dict[str, Callable[[int], object]] = {
        "breaching": lambda steps: peer.attack(victims, steps, weight),
        "fedveil": lambda steps: ours_whole_machine(ours, path, victims, steps, weight),
    }
    if len(ours) == 1:
        sides["plain"] = lambda steps: ours[0].submit(plain, path, victims, steps).result()
    took = in_turns(sides, case.steps)
    print(f"{case.model}: {took} cold {cold:.1f}", flush=True)
    table.add(
        f"{case.victims} × {case.steps}",
        "1" if peer.threads == 1 else f"all ({peer.threads})",
        1000 * took["breaching"] / (case.victims * case.steps),
        f"{took['breaching'] / took['plain']:.2f}×" if "plain" in took else "",
        f"{took['breaching'] / took['fedveil']:.2f}×",
        f"{took['breaching'] / cold:.2f}× ({cold:.0f} s)",
    )


def add_quality(table: Table, case: Case, path: Path, total_variation: float, peer: Breaching, ours: Workers) -> None:
    """One row: what both sides recover."""
    victims, (_, originals, normalization) = range(case.quality_victims), read_victims(path)
    theirs, own = (
        psnr(found, originals[: case.quality_victims], normalization.std)
        for found in (
            peer.attack(victims, case.quality_steps, total_variation),
            ours_whole_machine(ours, path, victims, case.quality_steps, total_variation),
        )
    )
    gain = own - theirs
    table.add(
        case.quality_victims,
        case.quality_steps,
        f"{total_variation:g}",
        f"{theirs.mean():.2f}",
        f"{own.mean():.2f}",
        f"{gain.mean():+.2f} ± {gain.std() / len(gain) ** 0.5:.2f}",
    )


def in_turns(sides: Mapping[str, Callable[[int], object]], steps: int) -> dict[str, float]:
    """Seconds of so many steps of each side: the best of some rounds in which the sides take turns, warm."""
    best = dict.fromkeys(sides, float("inf"))
    for call in sides.values():
        call(3)
    for _ in range(ROUNDS):
        for name, call in sides.items():
            best[name] = min(best[name], seconds(lambda call=call: call(steps)))  # type: ignore[misc]
    return best


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextlib.contextmanager
def empty_compile_cache() -> Iterator[None]:
    """Processes started in here compile anew."""
    places = "TORCHINDUCTOR_CACHE_DIR", "FEDVEIL_CACHE"
    before = {place: os.environ.get(place) for place in places}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({place: f"{folder}/{place}" for place in places})
        try:
            yield
        finally:
            for place, value in before.items():
                os.environ.pop(place)
                if value is not None:
                    os.environ[place] = value
