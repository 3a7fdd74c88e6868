"""What a mechanism spends over a run: dp-accounting behind a small type of ours.

dp-accounting takes seconds to import, so it is imported where it is used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fedveil.defenses.dp_gaussian import gaussian_epsilon
from fedveil.defenses.guarantee import GaussianRelease, LaplaceRelease

# Beyond these the fine-grained accountant needs gigabytes to find out that ε is huge.
_HUGE_EPSILON = 300.0
_TINY_NOISE = 0.05


@dataclass(frozen=True)
class Spent:
    """ε at δ, and by what reckoning."""

    epsilon: float
    delta: float
    how: str  # "PLD accountant"


def spent(mechanism: GaussianRelease | LaplaceRelease, delta: float) -> Spent:
    """The least ε that can be proven here for all releases together."""
    if mechanism.releases == 0:
        return Spent(0.0, 0.0, "nothing is released")
    if isinstance(mechanism, LaplaceRelease):
        return _pure(mechanism, delta)
    if mechanism.sampling_rate < 1 and mechanism.sampling == "poisson":
        rough = _poisson_rdp(mechanism, delta)
        return _poisson_pld(mechanism, delta, rough)
    # Gaussian noise on n releases is as good as one release with √n times less of it: exact, also if each release
    # depends on those before.
    exact = gaussian_epsilon(delta, mechanism.noise_multiplier / math.sqrt(mechanism.releases))
    found = Spent(exact, delta, "exact Gaussian composition")
    return found if mechanism.sampling_rate >= 1 else min(found, _fixed_rdp(mechanism, delta), key=_epsilon)


def worst(mechanisms: Sequence[GaussianRelease | LaplaceRelease], delta: float) -> Spent:
    """The most that any of several clients spends, each with a mechanism of its own."""
    rough: dict[GaussianRelease | LaplaceRelease, Spent] = {}
    for mechanism in mechanisms:
        if isinstance(mechanism, GaussianRelease) and mechanism.sampling_rate < 1 and mechanism.sampling == "poisson":
            rough[mechanism] = _poisson_rdp(mechanism, delta)  # cheap, and never below the fine-grained value
        else:
            rough[mechanism] = spent(mechanism, delta)
    most: Spent | None = None
    for mechanism in sorted(rough, key=lambda each: rough[each].epsilon, reverse=True):
        if most is not None and rough[mechanism].epsilon <= most.epsilon:
            break  # none of the rest can be worse
        found = spent(mechanism, delta)
        most = found if most is None else max(most, found, key=_epsilon)
    assert most is not None, "at least one mechanism is needed"
    return most


def _epsilon(found: Spent) -> float:
    return found.epsilon


def _poisson_rdp(mechanism: GaussianRelease, delta: float) -> Spent:
    dp_accounting = _library()
    event = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(mechanism.sampling_rate, event)
    accountant = dp_accounting.rdp.RdpAccountant()
    with _quiet():
        epsilon = accountant.compose(sampled, mechanism.releases).get_epsilon(delta)
    return Spent(float(epsilon), delta, "RDP accountant")


def _poisson_pld(mechanism: GaussianRelease, delta: float, rough: Spent) -> Spent:
    """The privacy loss distribution, rounded up on a grid; the RDP value where it is smaller or huge anyway."""
    if rough.epsilon > _HUGE_EPSILON or mechanism.noise_multiplier < _TINY_NOISE:
        return rough
    dp_accounting = _library()
    event = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(mechanism.sampling_rate, event)
    grid = 1e-4 if rough.epsilon < 5 else 1e-3
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=grid)
    with _quiet():
        epsilon = accountant.compose(sampled, mechanism.releases).get_epsilon(delta)
    return min(Spent(float(epsilon), delta, "PLD accountant"), rough, key=_epsilon)


def _fixed_rdp(mechanism: GaussianRelease, delta: float) -> Spent:
    """Sampling without replacement, neighbors by replacement (Wang, Balle & Kasiviswanathan 2019)."""
    dp_accounting = _library()
    whole = 10**9  # only the share counts
    event = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
    size = math.ceil(mechanism.sampling_rate * whole)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(whole, size, event)
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    with _quiet():
        epsilon = accountant.compose(sampled, mechanism.releases).get_epsilon(delta)
    return Spent(float(epsilon), delta, "RDP accountant for sampling without replacement")


def _pure(mechanism: LaplaceRelease, delta: float) -> Spent:
    """The sum, or at δ the optimal composition of pure releases where that is clearly less."""
    total = mechanism.epsilon * mechanism.releases
    tight = pure_epsilon(mechanism.epsilon, mechanism.releases, delta)
    if tight < 0.99 * total:
        return Spent(tight, delta, "optimal composition of pure releases")
    return Spent(total, 0.0, "basic composition")


def pure_epsilon(epsilon: float, releases: int, delta: float) -> float:
    """The least ε at δ of several ε-DP releases: that of randomized response, the worst of them all, exactly.

    Kairouz, Oh & Viswanath 2015. The loss of k yes and n - k no is (2k - n)·ε.
    """
    import numpy as np
    from scipy.special import expit
    from scipy.stats import binom

    yes = np.arange(releases + 1)
    chance = binom.pmf(yes, releases, expit(epsilon))
    loss = (2 * yes - releases) * epsilon
    low, high = 0.0, releases * epsilon
    for _ in range(60):
        middle = (low + high) / 2
        fails = float((chance * -np.expm1(np.minimum(middle - loss, 0.0))).sum())
        low, high = (low, middle) if fails <= delta else (middle, high)
    return high


def _library() -> Any:
    import dp_accounting  # type: ignore[import-untyped]

    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """The library logs every order that it leaves out. That only makes its bound looser."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
