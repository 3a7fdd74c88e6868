"""A lower bound of ε from one run with canaries.

Steinke, Nasr & Jagielski 2023, "Privacy auditing with one (1) training run".

Each of m canaries is in or out by a fair coin. Who sees what was released guesses the coins of r canaries, the surest
ones, and v of the guesses are right. Under (ε, δ)-DP a guess is right with chance e^ε/(1 + e^ε) at most, up to δ, and
their Theorem 5.2 bounds the chance of v right ones. So v of r right guesses refute every ε for which that is too small.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import expit
from scipy.stats import binom

# Shares of the canaries that are guessed. Each is tried; the confidence pays for it.
GUESSED = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
FEWEST = 10  # guesses


def chance_of_right(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The most that the chance of so many right guesses can be under (ε, δ)-DP.

    P[Binomial(r, p) ≥ v] + 2·m·δ·max over i of P[v − i ≤ Binomial(r, p) < v]/i, with p = e^ε/(1 + e^ε).

    >>> round(chance_of_right(100, 10, 10, epsilon=0.0, delta=0.0) * 2**10)
    1
    """
    p = float(expit(epsilon))
    by_luck = float(binom.sf(right - 1, guesses, p))
    below = np.arange(1, right + 1)
    spread = np.cumsum(binom.pmf(right - below, guesses, p)) / below
    return min(1.0, by_luck + 2 * canaries * delta * float(spread.max(initial=0.0)))


def least_epsilon(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """The greatest ε that so many right guesses refute with this confidence; 0 where they refute none."""
    doubt = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return chance_of_right(canaries, guesses, right, epsilon, delta) < doubt

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
        if high > 64:  # no number of canaries shows so much
            return low
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def guess_counts(canaries: int) -> tuple[int, ...]:
    """How many canaries are guessed, in several ways."""
    return tuple(sorted({max(math.ceil(share * canaries), min(FEWEST, canaries)) for share in GUESSED}))
