"""Timing that is fair to both sides: warm, the best of several, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def best_times(
    sides: Mapping[str, Callable[[], object]], rounds: int = 5, least: float = 0.2, *, processor: bool = False
) -> dict[str, float]:
    """Seconds of one call of each side: the best of some rounds in which the sides take turns.

    processor: count the processor's time of this process, for what runs on one thread: other jobs disturb it less.
    """
    clock = time.process_time if processor else time.perf_counter
    repeats = {}
    for name, call in sides.items():
        call()  # set-up and compilation are not part of it
        start = clock()
        call()
        repeats[name] = max(1, round(least / max(clock() - start, 1e-6)))
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, call in sides.items():
            start = clock()
            for _ in range(repeats[name]):
                call()
            best[name] = min(best[name], (clock() - start) / repeats[name])
    return best
