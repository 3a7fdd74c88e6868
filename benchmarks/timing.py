"""Timing that is fair to both sides: warm, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Sides = Mapping[str, Callable[[], object]]


def best_times(sides: Sides, rounds: int = 5, least: float = 0.2) -> dict[str, float]:
    """Seconds of one call of each side: the best of some rounds in which the sides take turns."""
    return {name: min(times) for name, times in turns(sides, rounds, least).items()}


def turns(sides: Sides, rounds: int, least: float, *, processor: bool = False) -> dict[str, list[float]]:
    """Seconds of one call of each side in every round, each from calls that take at least so long together.

    processor: count the processor's time of this process, for what runs on one thread: other jobs disturb it less.
    """
    clock = time.process_time if processor else time.perf_counter
    repeats = {}
    for name, call in sides.items():
        call()  # set-up and compilation are not part of it
        start = clock()
        call()
        repeats[name] = max(1, round(least / max(clock() - start, 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            if repeats[name] > 1:
                call()  # what it works on is in the caches again, where the other side's was
            start = clock()
            for _ in range(repeats[name]):
                call()
            found[name].append((clock() - start) / repeats[name])
    return found


def typical(figure: Callable[..., float], *times: list[float]) -> float:
    """The median over all rounds of a figure of that round's times.

    For differences of a few percent: the speed of a machine drifts, but in a short round it meets all sides alike.
    """
    return statistics.median(map(figure, *times))
