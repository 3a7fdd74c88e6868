"""How many examples an audit needs before its intervals can tell."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtri

from fedveil.auditing.result import Row
from fedveil.leakage.intervals import effective_count, paired_share_bounds

POWER = 0.8  # the chance that this many examples do tell
MOST = 10_000


def examples_needed(gained: float, lost: float, tells: Callable[[float, float], bool], *, worth: float = 1.0) -> int:
    """The smallest number of examples whose interval of a paired difference probably tells; `MOST` if none does.

    gained, lost: shares of the examples on which only the one, or only the other, says yes.
    tells: whether an interval with these ends would settle the matter.
    worth: of one example in independent ones, below 1 where examples of a batch stand or fall together.

    >>> examples_needed(0.5, 0.0, lambda low, high: low > 0)
    11
    """
    difference, spread = gained - lost, gained + lost - (gained - lost) ** 2
    count = 2
    while count < MOST:
        # Luck may take the measured difference to either side: the interval must tell all the same.
        luck = float(ndtri(POWER)) * math.sqrt(max(spread, 0.0) / (count * worth))
        shifted = [_bounds(difference + side * luck, lost, count * worth) for side in (-1, 1)]
        if all(tells(*ends) for ends in shifted):
            return count
        count = max(count + 1, round(count * 1.05))
    return MOST


def about(count: int) -> int:
    """A number to recommend: two digits, rounded up.

    >>> about(7), about(93), about(1234)
    (7, 93, 1300)
    """
    unit = int(10 ** max(0, len(str(count)) - 2))
    return -(-count // unit) * unit


def changes(row: Row, floor: Row, measure: str, groups: list[int]) -> tuple[float, float, float]:
    """On which shares of the examples only the row, or only the floor, says yes; and what one example is worth."""
    differences = np.asarray(row.values[measure]) - np.asarray(floor.values[measure])
    worth = effective_count(differences, groups, low=-1, high=1) / len(differences)
    return float((differences > 0).mean()), float((differences < 0).mean()), worth


def _bounds(difference: float, lost: float, count: float) -> tuple[float, float]:
    """The interval where the difference came out otherwise, by more or fewer gained examples."""
    return paired_share_bounds(min(max(difference + lost, 0.0), 1.0 - lost), lost, count)
