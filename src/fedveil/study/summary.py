"""What a table says, in sentences made from its numbers: whether the published order holds, what is noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import kendalltau

from fedveil.auditing.result import Estimate
from fedveil.leakage.catalog import METRICS
from fedveil.study.definition import UTILITY
from fedveil.study.outcome import Outcome, Value

DRAWS = 1000


def summary(outcome: Outcome) -> list[str]:
    """The sentences, group by group and column by column."""
    told = []
    for group in outcome.groups:
        where = f"{group}: " if group else ""
        for column in outcome.heads:
            told += [f"{where}{sentence}" for sentence in _column(outcome, outcome.of(group, column), column)]
        told += [f"{where}{sentence}" for sentence in _overturned(outcome, group)]
    return told or ["Nothing was run yet: there is nothing to say."]


def order(values: Sequence[Value]) -> Estimate | None:
    """Kendall's τ between the published order of rows and ours, with the interval that ours' intervals give it."""
    both = [(each.printed, each.ours) for each in values if each.printed is not None and each.ours is not None]
    if len(both) < 3 or len({printed for printed, _ in both}) < 2:
        return None
    printed = [each for each, _ in both]
    ours = [each for _, each in both if each is not None]
    random = np.random.Generator(np.random.Philox(0))
    spreads = np.array([(each.high - each.low) / (2 * 1.96) for each in ours])
    means = np.array([each.mean for each in ours])
    drawn = means + spreads * random.standard_normal((DRAWS, len(means)))
    found = np.array([_tau(printed, row) for row in drawn])
    low, high = np.quantile(found, [0.025, 0.975])
    mean = _tau(printed, means)
    return Estimate(mean=mean, low=min(float(low), mean), high=max(float(high), mean), count=len(ours))


def _tau(printed: Sequence[float | None], ours: object) -> float:
    found = float(kendalltau(printed, ours).statistic)
    return 0.0 if np.isnan(found) else found


def _column(outcome: Outcome, values: Sequence[Value], column: str) -> list[str]:
    """Of one column: rows that show different metrics have no common order."""
    told = []
    metrics = dict.fromkeys(each.metric for each in values)
    for metric in metrics:
        mine = [each for each in values if each.metric == metric and each.ours is not None]
        name = column if len(metrics) == 1 else f"{column}, {metric}"
        told += [f"{name}: {sentence}" for sentence in (_ordered(mine), _noise(outcome, mine)) if sentence]
    return told


def _ordered(values: Sequence[Value]) -> str:
    tau = order(values)
    if tau is None:
        return ""
    if not all(map(_spread_known, values)):
        return f"Kendall's τ {tau.mean:.2f} over {tau.count} rows; how much is noise is not known from one run."
    verdict = "the published order holds" if tau.low > 0 else "the order is reversed" if tau.high < 0 else "undecided"
    return f"{verdict} (Kendall's τ {tau.mean:.2f} [{tau.low:.2f}, {tau.high:.2f}] over {tau.count} rows)."


def _noise(outcome: Outcome, values: Sequence[Value]) -> str:
    """Which rows cannot be told from the paper's own method."""
    if not all(map(_spread_known, values)):
        return ""
    found = []
    for own in (each for each in values if each.row in outcome.own):
        others = [each for each in values if each.row not in outcome.own]
        alike = [each.row for each in others if _overlap(own.ours, each.ours)]
        if alike:
            found.append(f"{own.row} is within noise of {_all_of(alike, others)}")
    return "; ".join(found) + "." if found else ""


def _spread_known(value: Value) -> bool:
    return value.ours is not None and (value.ours.count > 1 or value.ours.high > value.ours.low)


def _overlap(a: Estimate | None, b: Estimate | None) -> bool:
    assert a is not None
    assert b is not None
    return a.low <= b.high and b.low <= a.high


def _overturned(outcome: Outcome, group: str) -> list[str]:
    """Where an attacker who knows the defense, or who sees the perturbed input, gets clearly more."""
    told = []
    for value in outcome.values:
        if value.group != group or value.ours is None or value.metric in UTILITY:
            continue
        metric = METRICS[value.metric]
        for who, other in (
            ("who knows the defense", value.informed),
            ("who sees the perturbed input", value.perturbed),
        ):
            if other is None or _overlap(value.ours, other) or not metric.leaks_more(other.mean, value.ours.mean):
                continue
            told.append(
                f"{value.row}, {value.column}: {value.ours.mean:.3g} for the attacker of the paper, {other.mean:.3g} "
                f"for one {who}: it protects less than the table shows."
            )
    return told


def _all_of(alike: Sequence[str], others: Sequence[Value]) -> str:
    return "all others" if len(alike) == len(others) > 1 else ", ".join(alike)
