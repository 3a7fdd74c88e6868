"""What a formal guarantee means for an attacker who has to pick the right one of several candidates."""

from __future__ import annotations

import math

from scipy.special import expit, ndtr, ndtri

from fedveil.defenses.base import Defense
from fedveil.defenses.guarantee import ONE_EXAMPLE, Exposure, GaussianRelease, Guarantee, LaplaceRelease
from fedveil.ledger.statement import Statement


def most_picked(promised: Statement, exposure: Exposure, among: int, views: int = 1) -> float | None:
    """How often any attacker at all can pick the right one of `among` equally likely candidates from one update.

    views: from so many messages about the same batch, each with noise of its own. Their guarantees are composed without
    any amplification: the batch is drawn once, so drawing it cannot help every message anew.

    None where no guarantee covers that: there is no formal one, or it holds for single entries only, or not against
    the server. Candidates are whole updates, or, where one training example is protected, updates that differ in it.
    """
    bounds = [_bound(defense, guarantee, exposure, among, views) for defense, guarantee in promised.holding]
    return min((bound for bound in bounds if bound is not None), default=None)


def _bound(defense: Defense, guarantee: Guarantee, exposure: Exposure, among: int, views: int) -> float | None:
    if defense.acts_at == "server" or exposure.releases == 0:
        return None  # the attacker is the server, which sees what comes before
    # The mechanism's uses behind one update, and behind all messages about it.
    times = views * exposure.uses(defense.acts_at) / exposure.releases
    match guarantee.mechanism:
        case LaplaceRelease(epsilon=epsilon):
            return pure_bound(times * epsilon, among)
        case GaussianRelease(noise_multiplier=multiplier):
            # Candidates replace each other. A guarantee for one example more or less covers half of that distance.
            distance = 2 if guarantee.protects == ONE_EXAMPLE else 1
            return gaussian_bound(distance * math.sqrt(times) / multiplier, among)
        case _:
            return None


def pure_bound(epsilon: float, among: int) -> float:
    """Under ε-LDP of the whole update: e^ε/(e^ε + N − 1).

    >>> round(pure_bound(0.0, 100), 3), round(pure_bound(3.0, 100), 3)
    (0.01, 0.169)
    """
    return float(expit(epsilon - math.log(among - 1)))


def gaussian_bound(mu: float, among: int) -> float:
    """Under μ-GDP (Gaussian noise, μ = distance/σ): Φ(Φ⁻¹(1/N) + μ).

    >>> round(gaussian_bound(2.0, 100), 2)
    0.37
    """
    return float(ndtr(ndtri(1 / among) + mu))
