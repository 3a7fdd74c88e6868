"""Timing that is fair to both sides: warm, the best of several, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def best_times(sides: Mapping[str, Callable[[], object]], rounds: int = 5, least: float = 0.2) -> dict[str, float]:
    """Seconds of one call of each side: the best of some rounds in which the sides take turns."""
    repeats = {}
    for name, call in sides.items():
        call()  # set-up and compilation are not part of it
        start = time.perf_counter()
        call()
        repeats[name] = max(1, round(least / (time.perf_counter() - start)))
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, call in sides.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / repeats[name])
    return best
