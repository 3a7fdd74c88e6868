"""How well members are told from others: ROC curves over candidates, with their intervals. Needs no torch.

Each row of scores is about one thing that was shared: an update, or a model. A member is compared with the others of
its own row, so rows need not be on one scale. What a member's score is worth is the false alarms it costs: the share of
the others who score as high. The share of members who cost at most f of false alarms is the ROC curve at f.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedveil.errors import FedveilError
from fedveil.leakage.intervals import Interval, bootstrap, expanded_tail

AUC = "member_auc"
RATES = {"member_tpr_1": 0.01, "member_tpr_01": 0.001}  # metric -> the false alarms that the attacker may raise
CHANCE: Mapping[str, float] = {AUC: 0.5, **RATES}
FEWEST_ALARMS = 10  # others behind a rate of false alarms, or it is not measured
MOST_PAIRS = 2**24  # comparisons that are held at a time

MEMBER, OTHER, LEFT_OUT = 1, 0, -1

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Told:
    """How well members were told from others."""

    metrics: dict[str, Interval]  # AUC, and the share of members found at each rate that was measured
    values: dict[str, list[float]]  # the same metrics, one value for each member, whose mean it is
    curve: tuple[list[float], list[float]]  # the ROC curve: false alarms, and members found; both rise
    others: int  # of a row


def told(scores: ArrayLike, kinds: ArrayLike, *, resamples: int = 1000, seed: int = 0) -> Told:
    """Score tests of membership.

    scores: (rows, candidates), larger where membership is likelier. What is not a number counts as the least.
    kinds: of the same shape: `MEMBER`, `OTHER`, or `LEFT_OUT` of that row. The others stand in the same columns of
        every row.

    Intervals: members and others are resampled apart from each other, members row by row, as those of one update stand
    or fall together; a single row's one by one. A share gets at least the Wilson interval of its members. Where an AUC
    is 0 or 1, resampling shows nothing: there the members that this interval leaves open count as guessed.

    >>> found = told([[3.0, 1.0, 2.0, 0.0]], [[1, 1, 0, 0]])
    >>> found.metrics["member_auc"].mean, found.curve
    (0.75, ([0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]))
    """
    numbers = np.nan_to_num(np.asarray(scores, dtype=np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    marks = np.asarray(kinds)
    if numbers.ndim != 2 or numbers.shape != marks.shape:
        raise FedveilError(f"every score needs a kind: got shapes {numbers.shape} and {marks.shape}")
    columns = np.flatnonzero((marks == OTHER).all(0))
    rows, places = np.nonzero(marks == MEMBER)
    if not len(rows) or not len(columns) or (marks == OTHER).sum() != len(columns) * len(marks):
        raise FedveilError("members are told from others that all rows share: there must be some of both")
    members, others = numbers[rows, places], numbers[:, columns]
    below, alarms = _ranks(members, rows, others)
    values = {AUC: below} | {name: (alarms <= rate).astype(np.float64) for name, rate in _measured(len(columns))}
    drawn = _resampled(members, rows, others, list(values), resamples, seed)
    return Told(
        metrics={name: _interval(name, values[name], rows, drawn[name]) for name in values},
        values={name: [float(each) for each in value] for name, value in values.items()},
        curve=_curve(alarms),
        others=len(columns),
    )


def _measured(others: int) -> Iterator[tuple[str, float]]:
    return ((name, rate) for name, rate in RATES.items() if others * rate >= FEWEST_ALARMS - 1e-9)


def others_needed(metric: str) -> int:
    """How many others a share at a rate of false alarms takes.

    >>> others_needed("member_tpr_1")
    1000
    """
    return round(FEWEST_ALARMS / RATES[metric])


def _ranks(members: Numbers, rows: NDArray[np.intp], others: Numbers) -> tuple[Numbers, Numbers]:
    """Of every member: the share of the others below it, equals by half, and the share at or above it."""
    count = others.shape[1]
    ordered = np.sort(others, axis=1)
    smaller, upto = (
        np.array([np.searchsorted(ordered[row], score, side) for row, score in zip(rows, members, strict=True)])
        for side in ("left", "right")
    )
    return (smaller + upto) / (2 * count), (count - smaller) / count


def _curve(alarms: Numbers) -> tuple[list[float], list[float]]:
    """The corners of the ROC curve: at most how many false alarms for how many members."""
    levels, counts = np.unique(alarms, return_counts=True)
    found = np.cumsum(counts) / len(alarms)
    return [0.0, *levels.tolist(), 1.0], [0.0, *found.tolist(), 1.0]


def _resampled(
    members: Numbers, rows: NDArray[np.intp], others: Numbers, names: list[str], resamples: int, seed: int
) -> dict[str, Numbers]:
    """The metrics over and over again, each time with other members and other others."""
    random = np.random.Generator(np.random.Philox(seed))
    groups = _groups(rows)
    count, many = int(groups.max()) + 1, others.shape[1]
    chosen = random.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float32)
    weight = chosen[:, groups]  # (resamples, members)
    drawn = random.multinomial(many, np.full(many, 1 / many), size=resamples).astype(np.float32).T / many
    total = {name: np.zeros(resamples) for name in names}
    step = max(1, MOST_PAIRS // max(many, resamples))
    for start in range(0, len(members), step):
        part = slice(start, start + step)
        own, beside = members[part, None], others[rows[part]]
        higher = (beside >= own).astype(np.float32)
        alarms = higher @ drawn  # (members of the part, resamples)
        equal = (beside == own).astype(np.float32)
        below = 1 - alarms + (equal @ drawn) / 2 if equal.any() else 1 - alarms
        weights = weight[:, part].T
        for name in names:
            # A share of others in single precision: half a candidate is far above its rounding.
            got = below if name == AUC else alarms <= RATES[name] + 0.5 / many / many
            total[name] += (weights * got).sum(0, dtype=np.float64)
    return {name: each / weight.sum(1, dtype=np.float64) for name, each in total.items()}


def _groups(rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """What is resampled together: the members of a row, or each by itself where there is one row."""
    _, groups = np.unique(rows, return_inverse=True)
    return np.arange(len(rows)) if groups.max() == 0 else groups


def _interval(name: str, values: Numbers, rows: NDArray[np.intp], drawn: Numbers) -> Interval:
    groups, mean = _groups(rows), float(values.mean())
    tail = expanded_tail(0.95, int(groups.max()) + 1)
    low, high = (float(end) for end in np.quantile(drawn, [tail, 1 - tail]))
    if name != AUC or mean in (0.0, 1.0):
        shares = bootstrap(values, groups=groups, share=True)
        worth = 0.5 if name == AUC else 1.0
        low, high = min(low, mean - worth * (mean - shares.low)), max(high, mean + worth * (shares.high - mean))
    return Interval(mean, min(low, mean), max(high, mean), len(values))
