"""Intervals of means over images: bootstrap for measured values, closed forms for shares. Needs no torch.

Images of the same batch or seed stand or fall together. Pass `groups`, one label per image, and whole groups are
resampled: many images of few batches then count as few.

Values that are booleans (or `share=True`) are a share, and the bootstrap is no use there: when all agree, its interval
has no width, as if 8 failures out of 8 proved that the attack never works. Shares get the Wilson interval instead,
their paired differences that of Agresti and Min.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri, stdtrit

from fedveil.errors import FedveilError

Values = NDArray[np.float64]
Codes = NDArray[np.intp]


@dataclass(frozen=True)
class Interval:
    """A mean, its interval, and the number of values behind it."""

    mean: float
    low: float
    high: float
    count: int


def bootstrap(
    values: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    share: bool | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The mean of `values` (N,) with its interval; the same seed gives the same interval.

    Measured values: the percentile bootstrap, with its quantiles moved outward for few values (Hesterberg 2015,
    "expanded percentile"). With 5 normal values the plain 95 % interval covers the mean in about 84 % of cases, this
    one in 91 %; with 32 both are near 95 %. Skewed values fare worse. One value alone has an interval of no width: look
    at `count`. One group alone does not show how groups differ; its values are then resampled one by one, which is too
    narrow if they depend on each other.

    Shares (booleans, or `share=True` with zeros and ones): the Wilson interval for as many independent images as the
    groups are worth, see `effective_count`.

    >>> never = bootstrap([False] * 20)
    >>> never.mean, never.low, round(never.high, 3)
    (0.0, 0.0, 0.161)
    """
    measured, codes = _checked(values, groups, level)
    if _is_share(share, values):
        _must_be_share(measured)
        return _wilson(measured, codes, level)
    return _percentile(measured, codes, level, resamples, seed)


def paired(
    a: ArrayLike,
    b: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    share: bool | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The mean of a - b over the same images, with its interval. An interval without 0 tells the two apart.

    Methods and options as for `bootstrap`; differences of shares get the interval of Agresti and Min (2005), which
    keeps its width when the two agree on every image.
    """
    first, codes = _checked(a, groups, level)
    second, _ = _checked(b, groups, level)
    if first.shape != second.shape:
        raise FedveilError(f"a paired comparison needs the same images: got {len(first)} and {len(second)} values")
    if _is_share(share, a, b):
        _must_be_share(first)
        _must_be_share(second)
        return _agresti_min(first - second, codes, level)
    return _percentile(first - second, codes, level, resamples, seed)


def effective_count(values: ArrayLike, groups: ArrayLike, *, low: float = 0.0, high: float = 1.0) -> float:
    """How many independent values the grouped ones are worth, between the number of groups and of values.

    It is the number divided by the design effect: the variance of the mean as the groups show it, over the variance
    if all were independent. Values that all agree show neither, so one made-up group of `low` and one of `high` are
    added first: with few groups the values count as hardly more than the groups, with many the data decide.
    """
    measured, codes = _checked(values, groups, 0.95)
    return _effective_count(measured, codes, low, high)


def _percentile(values: Values, codes: Codes, level: float, resamples: int, seed: int) -> Interval:
    if codes.max() == 0:
        codes = np.arange(len(values))
    sums, sizes = np.bincount(codes, weights=values), np.bincount(codes).astype(np.float64)
    count = len(sums)
    random = np.random.Generator(np.random.Philox(seed))
    chunk = max(1, 2**20 // count)
    means = []
    for start in range(0, resamples, chunk):
        drawn = random.integers(count, size=(min(chunk, resamples - start), count))
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    tail = expanded_tail(level, count)
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return _interval(values, float(low), float(high))


def expanded_tail(level: float, count: int) -> float:
    """The share of bootstrap means to leave out at each end: (1 - level)/2 for many values, less for few."""
    if count < 2:
        return (1 - level) / 2
    return float(ndtr(math.sqrt(count / (count - 1)) * stdtrit(count - 1, (1 - level) / 2)))


def _wilson(values: Values, codes: Codes, level: float) -> Interval:
    count, share, z = _effective_count(values, codes, 0, 1), float(values.mean()), _normal_quantile(level)
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return _interval(values, max(0.0, center - half), min(1.0, center + half))


def _agresti_min(differences: Values, codes: Codes, level: float) -> Interval:
    count = _effective_count(differences, codes, -1, 1)
    gained, lost = float((differences > 0).mean()), float((differences < 0).mean())
    return _interval(differences, *paired_share_bounds(gained, lost, count, level=level))


def paired_share_bounds(gained: float, lost: float, count: float, *, level: float = 0.95) -> tuple[float, float]:
    """The interval of a difference of two shares over the same `count` images (Agresti and Min 2005).

    gained, lost: the shares of the images on which only the first, or only the second, says yes.

    >>> [round(end, 2) for end in paired_share_bounds(0.5, 0.0, 16)]
    [0.19, 0.7]
    """
    # Half an image is added to each of the four ways in which two yes-or-no values can come out.
    total = count + 2
    more, fewer = gained * count + 0.5, lost * count + 0.5
    center = (more - fewer) / total
    half = _normal_quantile(level) * math.sqrt(more + fewer - (more - fewer) ** 2 / total) / total
    return max(-1.0, center - half), min(1.0, center + half)


def _effective_count(values: Values, codes: Codes, low: float, high: float) -> float:
    sizes = np.bincount(codes)
    extra = len(values) / len(sizes)  # images in each of the two made-up groups
    sums = np.append(np.bincount(codes, weights=values), [low * extra, high * extra])
    counts = np.append(sizes, [extra, extra])
    total = counts.sum()
    mean = sums.sum() / total
    spread = (np.square(values).sum() + extra * (low**2 + high**2)) / total - mean**2
    between = np.square(sums - mean * counts).sum() * len(sums) / (len(sums) - 1) / total**2
    worth = len(values) * (spread / total) / between
    fewest = len(values) ** 2 / np.square(sizes).sum()  # the number of groups, when they are of one size
    return float(np.clip(worth, fewest, len(values)))


def _interval(values: Values, low: float, high: float) -> Interval:
    mean = float(values.mean())
    # Rounding, and the shrinkage of Agresti and Min, must not leave the mean outside its own interval.
    return Interval(mean=mean, low=min(low, mean), high=max(high, mean), count=len(values))


def _checked(values: ArrayLike, groups: ArrayLike | None, level: float) -> tuple[Values, Codes]:
    measured = np.asarray(values, dtype=np.float64)
    if measured.ndim != 1 or not len(measured):
        raise FedveilError(f"an interval needs a list of at least one value, got shape {measured.shape}")
    lost = int((~np.isfinite(measured)).sum())
    if lost:
        raise FedveilError(f"{lost} of {len(measured)} values are not finite: leave them out or say what they count as")
    if not 0 < level < 1:
        raise FedveilError(f"level must be between 0 and 1, for example 0.95 (got {level})")
    if groups is None:
        return measured, np.arange(len(measured))
    labels = np.asarray(groups)
    if labels.shape != measured.shape:
        raise FedveilError(f"groups must name one group per value: {len(measured)} values, groups {labels.shape}")
    return measured, np.unique(labels, return_inverse=True)[1]


def _is_share(share: bool | None, *values: ArrayLike) -> bool:
    return all(np.asarray(each).dtype == np.bool_ for each in values) if share is None else share


def _must_be_share(values: Values) -> None:
    if not np.isin(values, (0, 1)).all():
        raise FedveilError("a share is made of zeros and ones; leave out `share` for measured values")


def _normal_quantile(level: float) -> float:
    return float(ndtri((1 + level) / 2))
