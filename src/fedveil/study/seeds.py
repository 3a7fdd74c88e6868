"""Means over examples and seeds, with intervals that cover both: other examples, and another run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from fedveil.auditing.result import Estimate
from fedveil.leakage.intervals import bootstrap


def over_seeds(runs: Sequence[tuple[Estimate, Sequence[float]]], *, share: bool, per_update: int = 1) -> Estimate:
    """The mean over the examples of several runs, each with its own estimate and, where known, one value per example.

    share: whether values are yes or no.
    per_update: examples behind one update, which are not independent.
    """
    estimates = [estimate for estimate, _ in runs]
    values = [np.asarray(listed, dtype=np.float64) for _, listed in runs]
    if len(runs) == 1:
        return estimates[0]
    if any(len(each) != estimate.count or not len(each) for each, estimate in zip(values, estimates, strict=True)):
        return pooled(estimates)
    groups = np.concatenate([place * 10**6 + np.arange(len(v)) // per_update for place, v in enumerate(values)])
    whole = bootstrap(np.concatenate(values), groups=groups, share=share)
    return widened(Estimate(mean=whole.mean, low=whole.low, high=whole.high, count=whole.count), estimates, share)


def pooled(estimates: Sequence[Estimate], *, share: bool = False) -> Estimate:
    """The same from the estimates of the runs alone, which may be of the same examples: those do not average out."""
    mean = float(np.mean([each.mean for each in estimates]))
    low, high = (float(np.mean([getattr(each, end) for each in estimates])) for end in ("low", "high"))
    whole = Estimate(mean=mean, low=min(low, mean), high=max(high, mean), count=sum(each.count for each in estimates))
    return whole if len(estimates) == 1 else widened(whole, estimates, share)


def widened(whole: Estimate, runs: Sequence[Estimate], share: bool) -> Estimate:
    """The interval over examples, widened by how much runs differ beyond what their examples explain.

    That spread is small or unknown with two or three seeds: Student's quantile makes up for it.
    """
    means = np.array([each.mean for each in runs])
    sampling = np.mean([((each.high - each.low) / (2 * 1.96)) ** 2 for each in runs])
    beyond = max(float(means.var(ddof=1)) - float(sampling), 0.0)
    reach = float(stdtrit(len(runs) - 1, 0.975)) * math.sqrt(beyond / len(runs))
    low, high = (
        whole.mean - math.hypot(whole.mean - whole.low, reach),
        whole.mean + math.hypot(whole.high - whole.mean, reach),
    )
    if share:
        low, high = max(low, 0.0), min(high, 1.0)
    return whole.model_copy(update={"low": low, "high": high})
