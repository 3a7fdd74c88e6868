"""Axes of the charts: ranges, ticks at round numbers, and where a value falls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Beyond this a span overflows to infinity; such a value is as good as infinite on a chart.
LARGEST = 1e300
SMALLEST = 1e-290
# A logarithmic axis is worth its strangeness once the values span this factor.
WORTH_A_LOG = 30.0

SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Scale:
    """A stretch of numbers with its ticks; `place` maps it to 0..1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value falls between the ends (0 and 1); values outside are kept at the nearer end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return min(max((math.log(value) - low) / (high - low), 0.0), 1.0)
        return (value - self.low) / (self.high - self.low)


def drawable(value: float) -> bool:
    """Whether a value can be drawn at all."""
    return math.isfinite(value) and abs(value) < LARGEST


def linear_scale(
    values: Iterable[float], *, count: int = 5, whole: bool = False, percent: bool = False, tight: bool = False
) -> Scale:
    """A linear axis around the values.

    `whole`: ticks at whole numbers only. `percent`: values are fractions, kept within 0 and 1 and labeled in percent.
    `tight`: the axis ends where the values end rather than at a tick.

    >>> linear_scale([0.0, 9.3]).labels
    ('0', '2', '4', '6', '8', '10')
    >>> linear_scale([0.81, 0.88], percent=True).labels
    ('80\\xa0%', '82\\xa0%', '84\\xa0%', '86\\xa0%', '88\\xa0%')
    """
    kept = [value for value in values if drawable(value)] or [0.0, 1.0]
    low, high = min(kept), max(kept)
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, SMALLEST):  # a flat line, up to rounding
        margin = 0.05 if percent else max(1.0, 1e-6 * size) if whole or size < SMALLEST else 0.5 * size
        low, high = low - margin, high + margin
    if percent:
        low, high = max(low, 0.0), min(high, 1.0)
        if high - low < 1e-9:  # the values lie outside of what a fraction can be
            low, high = 0.0, 1.0
    step = _nice_step((high - low) / max(count, 1))
    if whole:
        step = max(step, 1.0)
    inner = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    outer = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    first, last = inner if tight else (outer[0], max(outer[1], outer[0] + 1))
    ticks = tuple(index * step for index in range(first, last + 1))
    if not tight:
        low, high = ticks[0], ticks[-1]
    return Scale(low, high, ticks, _linear_labels(ticks, step, percent))


def log_scale(values: Sequence[float]) -> Scale | None:
    """A logarithmic axis around the values, or None where it would not help: values at or below 0, or a short span.

    >>> log_scale([0.02, 31.0]).labels
    ('0.1', '1', '10')
    >>> log_scale([1.0, 2.0]) is None
    True
    """
    kept = [value for value in values if drawable(value)]
    if not kept or min(kept) <= SMALLEST or max(kept) / min(kept) < WORTH_A_LOG:
        return None
    low, high = math.log10(min(kept)), math.log10(max(kept))
    margin = 0.04 * (high - low)
    low, high = max(low - margin, -300.0), min(high + margin, 300.0)
    every = max(1, math.ceil((high - low) / 6))
    powers = [power for power in range(math.ceil(low), math.floor(high) + 1) if power % every == 0]
    plain = all(-3 <= power <= 4 for power in powers)
    labels = tuple(f"{10.0**power:,g}" if plain else f"10{str(power).translate(SUPERSCRIPTS)}" for power in powers)
    return Scale(10.0**low, 10.0**high, tuple(10.0**power for power in powers), labels, log=True)


def _nice_step(rough: float) -> float:
    """The round number (1, 2 or 5 times a power of ten) at or above a rough step."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if rough <= factor * power * (1 + 1e-9))


def _linear_labels(ticks: Sequence[float], step: float, percent: bool) -> tuple[str, ...]:
    if percent:
        ticks, step = [tick * 100 for tick in ticks], step * 100
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if decimals > 6 or largest >= 1e9:
        texts = [f"{tick:.3g}" for tick in ticks]
    else:
        texts = [f"{tick:,.{decimals}f}" for tick in ticks]
    return tuple(text.replace("-", "−") + ("\u00a0%" if percent else "") for text in texts)
