"""What mechanisms spend over a run: dp-accounting behind a small type of ours.

dp-accounting takes seconds to import, so it is imported where it is used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fedveil.defenses.dp_gaussian import gaussian_epsilon
from fedveil.defenses.guarantee import GaussianRelease, LaplaceRelease

# Beyond these limits the fine-grained accountant needs gigabytes to find out that ε is huge.
_HUGE_EPSILON = 300.0
_TINY_NOISE = 0.05

Composable = GaussianRelease | LaplaceRelease


@dataclass(frozen=True)
class Spent:
    """ε at δ, and how it was computed."""

    epsilon: float
    delta: float
    how: str  # "PLD accountant"


def spent(mechanisms: Composable | Iterable[Composable], delta: float) -> Spent:
    """The least ε that can be proven here for all releases of one client together."""
    kinds = _kinds(mechanisms)
    if not kinds:
        return Spent(0.0, 0.0, "nothing is released")
    each = [_of_one_kind(kind, alike, delta / len(kinds)) for kind, alike in kinds.items()]
    if len(each) == 1:
        return each[0]
    return Spent(sum(part.epsilon for part in each), sum(part.delta for part in each), "basic composition")


def worst(clients: Sequence[Composable | Iterable[Composable]], delta: float) -> Spent:
    """The most that any of several clients spends, each with mechanisms of its own."""
    rough: dict[tuple[Composable, ...], float] = {}
    for mechanisms in clients:
        kinds = _kinds(mechanisms)
        key = tuple(each for alike in kinds.values() for each in alike)
        # The RDP value is cheap, and never below the fine-grained one.
        poisson = list(kinds) == ["poisson"]
        rough[key] = _poisson_rdp(kinds["poisson"], delta).epsilon if poisson else spent(key, delta).epsilon
    most: Spent | None = None
    for key in sorted(rough, key=lambda each: rough[each], reverse=True):
        if most is not None and rough[key] <= most.epsilon:
            break  # none of the rest can be worse
        found = spent(key, delta)
        most = found if most is None else max(most, found, key=_epsilon)
    assert most is not None, "at least one client is needed"
    return most


def _kinds(mechanisms: Composable | Iterable[Composable]) -> dict[str, tuple[Composable, ...]]:
    """The mechanisms grouped by what can be composed exactly. Equal ones are counted together, empty ones left out."""
    given = [mechanisms] if isinstance(mechanisms, GaussianRelease | LaplaceRelease) else list(mechanisms)
    counts: dict[Composable, int] = {}
    for each in given:
        if each.releases:
            settings = replace(each, releases=1)
            counts[settings] = counts.get(settings, 0) + each.releases
    found: dict[str, tuple[Composable, ...]] = {}
    for settings, releases in counts.items():
        if isinstance(settings, LaplaceRelease):
            kind = f"pure {settings.epsilon}"
        else:
            kind = "whole" if settings.sampling_rate >= 1 else settings.sampling
        found[kind] = (*found.get(kind, ()), replace(settings, releases=releases))
    for kind in ("poisson", "fixed"):
        if found.keys() == {"whole", kind}:  # the accountant takes both
            return {kind: found[kind] + found["whole"]}
    return found


def _of_one_kind(kind: str, alike: Sequence[Any], delta: float) -> Spent:
    if kind.startswith("pure"):
        return _pure(alike[0], delta)
    if kind == "poisson":
        return _poisson_pld(alike, delta, _poisson_rdp(alike, delta))
    # Gaussian noise on n releases is as good as one release with √n times less of it: exact, also if each release
    # depends on those before.
    noise = 1 / math.sqrt(sum(each.releases / each.noise_multiplier**2 for each in alike))
    found = Spent(gaussian_epsilon(delta, noise), delta, "exact Gaussian composition")
    return found if kind == "whole" else min(found, _fixed_rdp(alike, delta), key=_epsilon)


def _epsilon(found: Spent) -> float:
    return found.epsilon


def _poisson_rdp(alike: Sequence[Any], delta: float) -> Spent:
    accountant = _library().rdp.RdpAccountant()
    return Spent(_composed(accountant, alike, delta), delta, "RDP accountant")


def _poisson_pld(alike: Sequence[Any], delta: float, rough: Spent) -> Spent:
    """The privacy loss distribution, rounded up on a grid; the RDP value where it is smaller or huge anyway."""
    if rough.epsilon > _HUGE_EPSILON or any(each.noise_multiplier < _TINY_NOISE for each in alike):
        return rough
    grid = 1e-4 if rough.epsilon < 5 else 1e-3
    accountant = _library().pld.PLDAccountant(value_discretization_interval=grid)
    return min(Spent(_composed(accountant, alike, delta), delta, "PLD accountant"), rough, key=_epsilon)


def _composed(accountant: Any, alike: Sequence[Any], delta: float) -> float:
    library = _library()
    with _quiet():
        for each in alike:
            event = library.GaussianDpEvent(each.noise_multiplier)
            if each.sampling_rate < 1:
                event = library.PoissonSampledDpEvent(each.sampling_rate, event)
            accountant.compose(event, each.releases)
        return float(accountant.get_epsilon(delta))


def _fixed_rdp(alike: Sequence[Any], delta: float) -> Spent:
    """Sampling without replacement, neighbors by replacement (Wang, Balle & Kasiviswanathan 2019)."""
    library = _library()
    whole = 10**9  # only the share counts
    accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    with _quiet():
        for each in alike:
            event = library.GaussianDpEvent(each.noise_multiplier)
            if each.sampling_rate < 1:
                size = math.ceil(each.sampling_rate * whole)
                event = library.SampledWithoutReplacementDpEvent(whole, size, event)
            accountant.compose(event, each.releases)
        epsilon = accountant.get_epsilon(delta)
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
