"""What a formal guarantee means for an attacker who has to tell whether an example was used: a bound on its ROC curve.

A test that is given a member says so more often than one that is given another example, by no more than the guarantee
allows: TPR ≤ e^ε·FPR + δ. For Gaussian noise the curve itself is known: TPR ≤ Φ(Φ⁻¹(FPR) + μ).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.special import ndtr, ndtri

from fedveil.defenses.guarantee import ALL_DATA, ONE_EXAMPLE, Exposure, GaussianRelease, LaplaceRelease
from fedveil.ledger.statement import Statement

Curve = Callable[[float], float]  # from a rate of false alarms to the largest share of members that may be found
_POINTS = 4000  # at which a curve is taken for its area


def from_update(promised: Statement, exposure: Exposure, views: int = 1) -> Curve | None:
    """How well any attacker at all can tell the members of one update; None where no guarantee covers that.

    It sees one update, or `views` messages about the same batch. A batch without the example has another one in its
    place, and a guarantee for one example more or less covers half of that distance.
    """
    curves = []
    for defense, guarantee in promised.holding:
        if defense.acts_at == "server" or exposure.releases == 0:
            continue  # the attacker is the server, which sees what comes before
        times = views * exposure.uses(defense.acts_at) / exposure.releases
        match guarantee.mechanism:
            case LaplaceRelease(epsilon=epsilon):
                curves.append(by_epsilon(times * epsilon))
            case GaussianRelease(noise_multiplier=multiplier):
                distance = 2 if guarantee.protects == ONE_EXAMPLE else 1
                curves.append(by_gaussian(distance * math.sqrt(times) / multiplier))
    return (lambda rate: min(curve(rate) for curve in curves)) if curves else None


def from_model(promised: Statement) -> Curve | None:
    """The same of the trained model, by the ε and δ that the ledger composed over the whole run.

    A guarantee for single entries says nothing of an example; one for a client's data covers each of its examples.
    """
    units = {guarantee.protects for _, guarantee in promised.holding}
    if promised.epsilon is None or not units <= {ONE_EXAMPLE, ALL_DATA}:
        return None
    return by_epsilon(promised.epsilon, promised.delta or 0.0)


def by_epsilon(epsilon: float, delta: float = 0.0) -> Curve:
    """Under (ε, δ)-DP: e^ε·FPR + δ, and the same the other way round.

    >>> round(by_epsilon(1.0, 1e-5)(0.01), 4)
    0.0272
    """

    def curve(rate: float) -> float:
        if epsilon > 700:  # e^ε is no number any more
            return 1.0
        up = math.exp(epsilon) * rate + delta
        down = 1 - math.exp(-epsilon) * (1 - delta - rate)
        return min(1.0, max(0.0, min(up, down)))

    return curve


def by_gaussian(mu: float) -> Curve:
    """Under μ-GDP: Φ(Φ⁻¹(FPR) + μ).

    >>> round(by_gaussian(2.0)(0.01), 2)
    0.37
    """
    return lambda rate: float(ndtr(ndtri(rate) + mu))


def area(curve: Curve) -> float:
    """The largest AUC under a curve. Each step counts with its higher end: less than was proven must not be stated.

    >>> round(area(by_epsilon(0.0)), 3), area(by_epsilon(1000.0))
    (0.5, 1.0)
    """
    return sum(curve(rate / _POINTS) for rate in range(1, _POINTS + 1)) / _POINTS
