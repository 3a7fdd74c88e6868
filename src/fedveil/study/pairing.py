"""Rows of a table compared on the same images and seeds: what two have in common does not count as a difference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import Document, Estimate
from fedveil.leakage.intervals import Interval, bootstrap, expanded_tail, paired
from fedveil.study.seeds import widened

SEED = 10**6  # clusters of one seed have numbers between two multiples of this
DRAWS = 1000


class Sample(Document):
    """One value for each example, of all seeds, and which examples they are."""

    images: str  # a hash of the examples: two samples of the same are compared pair by pair
    values: list[float]
    clusters: list[int]  # examples of one update stand or fall together

    @classmethod
    def of(cls, audits: Sequence[AuditResult], values: Sequence[Sequence[float]], per_update: int) -> Sample | None:
        """The sample of several seeds; None where any of them has no value for each example."""
        if not values or not all(map(len, values)):
            return None
        told = hashlib.sha256()
        for audit in audits:
            told.update(np.ascontiguousarray(audit.images.originals).tobytes())
        clusters = [seed * SEED + i // per_update for seed, each in enumerate(values) for i in range(len(each))]
        return cls(images=told.hexdigest(), values=[v for each in values for v in each], clusters=clusters)

    def pairs_with(self, other: Sample) -> bool:
        """Whether both are of the same examples."""
        return (self.images, self.clusters) == (other.images, other.clusters)

    @property
    def seeds(self) -> NDArray[np.intp]:
        """The seed of each value, counted from 0."""
        return np.asarray(self.clusters) // SEED


def difference(a: Sample, b: Sample, *, share: bool) -> Estimate | None:
    """The mean of a - b by the paired bootstrap, widened by how much seeds differ; None if they are of other examples.

    An interval without 0 tells the two apart.
    """
    if not a.pairs_with(b):
        return None
    first, second, clusters = np.asarray(a.values), np.asarray(b.values), np.asarray(a.clusters)
    whole = _estimate(paired(first, second, groups=clusters, share=share))
    if not a.seeds.any():
        return whole
    seeds = [a.seeds == seed for seed in np.unique(a.seeds)]
    runs = [_estimate(bootstrap((first - second)[s], groups=clusters[s], share=False)) for s in seeds]
    return widened(whole, runs, share=False)


def order(printed: Sequence[float], means: Sequence[Estimate], samples: Sequence[Sample | None]) -> Estimate:
    """Kendall's τ between the printed order and ours, with a bootstrap interval.

    Where all rows are of the same examples, these are drawn anew for all rows at once, seeds first; where they are not,
    as with accuracies, each row's mean is drawn from its own interval.
    """
    known = [each for each in samples if each is not None]
    together = len(known) == len(samples) and all(known[0].pairs_with(each) for each in known)
    drawn = _redrawn(known) if together else _normal(means)
    random = sorted(_tau(printed, row) for row in drawn)
    mean = _tau(printed, [each.mean for each in means])
    tail = expanded_tail(0.95, len(set(known[0].clusters))) if together else 0.025
    low, high = np.quantile(random, [tail, 1 - tail])
    return Estimate(mean=mean, low=min(float(low), mean), high=max(float(high), mean), count=len(means))


def _redrawn(samples: Sequence[Sample]) -> NDArray[np.float64]:
    """The means of all rows over examples drawn with repetition, draw by draw."""
    random = np.random.Generator(np.random.Philox(0))
    values, clusters = np.asarray([each.values for each in samples]), np.asarray(samples[0].clusters)
    seeds = samples[0].seeds
    by_seed = []
    for seed in np.unique(seeds):
        mine = np.flatnonzero(seeds == seed)
        codes = np.unique(clusters[mine], return_inverse=True)[1]
        if codes.max() == 0:  # a single update says nothing of others: at least its examples vary
            codes = np.arange(len(mine))
        sums = np.asarray([np.bincount(codes, weights=row[mine]) for row in values])
        by_seed.append((sums, np.bincount(codes)))
    drawn = np.empty((DRAWS, len(samples)))
    for place in range(DRAWS):
        total, count = np.zeros(len(samples)), 0
        for seed in random.integers(len(by_seed), size=len(by_seed)):
            sums, sizes = by_seed[seed]
            chosen = random.integers(len(sizes), size=len(sizes))
            total, count = total + sums[:, chosen].sum(1), count + sizes[chosen].sum()
        drawn[place] = total / count
    return drawn


def _normal(means: Sequence[Estimate]) -> NDArray[np.float64]:
    random = np.random.Generator(np.random.Philox(0))
    spreads = np.array([(each.high - each.low) / (2 * 1.96) for each in means])
    drawn: NDArray[np.float64] = random.standard_normal((DRAWS, len(means)))
    return np.array([each.mean for each in means]) + spreads * drawn


def _tau(printed: Sequence[float], ours: Sequence[float] | NDArray[np.float64]) -> float:
    found = float(kendalltau(printed, ours).statistic)
    return 0.0 if np.isnan(found) else found


def _estimate(interval: Interval) -> Estimate:
    return Estimate(mean=interval.mean, low=interval.low, high=interval.high, count=interval.count)
