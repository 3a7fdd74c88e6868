"""What a table says, in sentences made from its numbers: whether the published order holds, what is noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedveil.auditing.result import Estimate
from fedveil.leakage.catalog import METRICS
from fedveil.study import pairing
from fedveil.study.definition import UTILITY
from fedveil.study.outcome import Outcome, Value


def summary(outcome: Outcome) -> list[str]:
    """The sentences, group by group and column by column."""
    told = []
    for group in outcome.groups:
        where = f"{group}: " if group else ""
        for column in outcome.heads:
            told += [f"{where}{sentence}" for sentence in _column(outcome, outcome.of(group, column), column)]
        told += [f"{where}{sentence}" for sentence in _overturned(outcome, group)]
    if all(value.ours is None for value in outcome.values):
        return ["There is no number yet: nothing can be said."]
    return told


def order(values: Sequence[Value]) -> Estimate | None:
    """Kendall's τ between the published order of rows and ours, with its interval; None for fewer than three rows."""
    both = [(each.printed, each.ours, each.sample) for each in values]
    known = [(p, ours, sample) for p, ours, sample in both if p is not None and ours is not None]
    if len(known) < 3 or len({printed for printed, _, _ in known}) < 2:
        return None
    printed, ours, samples = zip(*known, strict=True)
    return pairing.order(printed, ours, samples)


def difference(a: Value, b: Value) -> Estimate | None:
    """What a has more than b: on the same images and seeds where both are known for each, else by their intervals."""
    assert a.ours is not None
    assert b.ours is not None
    if a.sample is not None and b.sample is not None:
        found = pairing.difference(a.sample, b.sample, share=_is_share(a.metric))
        if found is not None:
            return found
    if not (_spread_known(a) and _spread_known(b)):
        return None
    return _apart(a.ours, b.ours)


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
    verdict = "the order is reversed" if tau.high < 0 else "undecided"
    if tau.low > 0:  # some pairs of rows surely stand the other way round where not even the interval reaches 1
        verdict = "the published order holds" if tau.high > 0.999 else "the published order holds in part"
    return f"{verdict} (Kendall's τ {tau.mean:.2f} [{tau.low:.2f}, {tau.high:.2f}] over {tau.count} rows)."


def _noise(outcome: Outcome, values: Sequence[Value]) -> str:
    """Which rows cannot be told from the paper's own method."""
    found = []
    for own in (each for each in values if each.row in outcome.own):
        others = [each for each in values if each.row not in outcome.own]
        apart = {each.row: difference(own, each) for each in others}
        alike = [row for row, each in apart.items() if each is not None and each.low <= 0 <= each.high]
        if alike:
            found.append(f"{own.row} is within noise of {_all_of(alike, others)}")
    return "; ".join(found).removesuffix(".") + "." if found else ""


def _spread_known(value: Value) -> bool:
    return value.ours is not None and (value.ours.count > 1 or value.ours.high > value.ours.low)


def _apart(a: Estimate, b: Estimate) -> Estimate:
    """a - b of two independent means."""
    half = math.hypot(a.high - a.low, b.high - b.low) / 2
    return Estimate(mean=a.mean - b.mean, low=a.mean - b.mean - half, high=a.mean - b.mean + half, count=a.count)


def _overturned(outcome: Outcome, group: str) -> list[str]:
    """Where an attacker who knows the defense, or who sees the perturbed input, gets clearly more."""
    told = []
    for value in outcome.values:
        if value.group != group or value.ours is None or value.metric in UTILITY:
            continue
        for who, other, sample in (
            ("who knows the defense", value.informed, value.informed_sample),
            ("who sees the perturbed input", value.perturbed, value.perturbed_sample),
        ):
            if other is None or not _clearly_more(value, other, sample):
                continue
            theirs, more = f"{value.ours.mean:.3g}", f"{other.mean:.3g}"
            if theirs == more:  # a difference that is certain, and of no weight
                continue
            told.append(
                f"{value.row}, {value.column}: {theirs} for the attacker of the paper, {more} "
                f"for one {who}: it protects less than the table shows{_claims(outcome, value, other, sample)}."
            )
    return told


def _clearly_more(value: Value, other: Estimate, sample: pairing.Sample | None) -> bool:
    assert value.ours is not None
    more = METRICS[value.metric].leaks_more(other.mean, value.ours.mean)
    both = None
    if value.sample is not None and sample is not None:
        both = pairing.difference(sample, value.sample, share=_is_share(value.metric))
    apart = both or _apart(other, value.ours)
    return more and not apart.low <= 0 <= apart.high


def _claims(outcome: Outcome, own: Value, other: Estimate, sample: pairing.Sample | None) -> str:
    """Which rows the paper's own method is better than by this column, and then no longer is."""
    if own.row not in outcome.own or own.ours is None:
        return ""
    metric, lost = METRICS[own.metric], []
    for each in outcome.of(own.group, own.column):
        if each.row in outcome.own or each.ours is None or each.metric != own.metric:
            continue
        apart = difference(own, each)
        better = metric.leaks_more(each.ours.mean, own.ours.mean) and apart and not apart.low <= 0 <= apart.high
        # The other row's attacker knows its defense, too, where that was tried.
        rival, rivals = (each.informed, each.informed_sample) if each.informed else (each.ours, each.sample)
        both = pairing.difference(sample, rivals, share=_is_share(own.metric)) if sample and rivals else None
        still = both or _apart(other, rival)
        if better and not (metric.leaks_more(rival.mean, other.mean) and not still.low <= 0 <= still.high):
            lost.append(each.row)
    return f", and its lead over {', '.join(lost)} is gone" if lost else ""


def _is_share(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].yes_or_no


def _all_of(alike: Sequence[str], others: Sequence[Value]) -> str:
    return "all others" if len(alike) == len(others) > 1 else ", ".join(alike)
