"""The calibrated Gaussian mechanism (DP-Gas in FedBARRE's sweep of ε): the noise follows from ε and δ."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from fedveil.defenses.base import Call, Facts, Strength
from fedveil.defenses.clip import clipped
from fedveil.defenses.densities import gaussian
from fedveil.defenses.dp_clip import ClippedNoise
from fedveil.defenses.guarantee import ALL_DATA, Exposure, GaussianRelease, Guarantee
from fedveil.defenses.noise import noisy
from fedveil.fields import Positive, declared
from fedveil.registry import defenses
from fedveil.tree import Tree

Delta = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]


@defenses.register("dp-gaussian")
@declared
class DPGaussian(ClippedNoise):
    """Clip each client's update to the norm `clip`, then add just the Gaussian noise that gives (epsilon, delta).

    Local: any two updates are neighbors, so the sensitivity is 2·clip. The noise is that of the analytic Gaussian
    mechanism (Balle & Wang 2018), the least that gives `epsilon` at `delta` for one release. The classical
    2·clip·√(2 ln(1.25/δ))/ε is proven for ε ≤ 1 only. It is still enough noise up to ε = 8.42 at δ = 1e-5 (6.77 at
    1e-2, 9.62 at 1e-9), and too little beyond: see `classical_limit`.
    """

    paper = "the DP-Gas baseline of FedBARRE; Balle & Wang 2018"
    promises = "epsilon at delta for all data of a client, per release"
    strength = Strength("epsilon", "down", weak=1e4, strong=1.0)
    epsilon: Positive = 8.0  # ε in the papers: the budget of one release
    delta: Delta = 1e-5  # δ in the papers: the chance that ε does not hold
    clip: Positive = 1.0  # C in the papers: largest norm of an update
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise on one entry."""
        return 2 * self.clip * gaussian_multiplier(self.epsilon, self.delta)

    def variance(self, size: int) -> float:
        """sigma²."""
        return self.sigma**2

    def protect(self, update: Tree, call: Call) -> Tree:
        """g · min(1, clip/‖g‖) + N(0, sigma²)."""
        return noisy(clipped(update, self.clip), self.sigma, call.streams.normal_like)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """(epsilon, delta) in every release."""
        return Guarantee(
            f"Formal guarantee: ε = {self.epsilon:g} at δ = {self.delta:g} in every single release, for any two "
            "updates that a client could send; ε grows with every release.",
            formal=True,
            protects=ALL_DATA,
            mechanism=GaussianRelease(gaussian_multiplier(self.epsilon, self.delta), exposure.uses(self.acts_at)),
        )

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Gaussian around what came in, clipped."""
        return gaussian(observed, clipped(given, self.clip), self.sigma)


# ---- the Gaussian mechanism, exactly (Balle & Wang 2018, Theorem 8) ------------------------------------------


def gaussian_delta(epsilon: float, multiplier: float) -> float:
    """The δ at ε of Gaussian noise with `multiplier` times the sensitivity.

    >>> round(gaussian_delta(1.0, 1.0), 4)
    0.1269
    """
    from scipy.special import log_ndtr

    shift = 1 / multiplier
    first = float(log_ndtr(shift / 2 - epsilon / shift))
    second = epsilon + float(log_ndtr(-shift / 2 - epsilon / shift))
    # exp(first) - exp(second), which keeps its digits where both are tiny.
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def gaussian_epsilon(delta: float, multiplier: float) -> float:
    """The least ε at δ of Gaussian noise with `multiplier` times the sensitivity, rounded up."""
    if gaussian_delta(0.0, multiplier) <= delta:
        return 0.0
    return _least(lambda epsilon: gaussian_delta(epsilon, multiplier) <= delta)


@lru_cache(maxsize=1024)
def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The least noise, in units of the sensitivity, that gives (ε, δ), rounded up.

    >>> round(gaussian_multiplier(1.0, 1e-5), 3)
    3.731
    """
    return _least(lambda multiplier: gaussian_delta(epsilon, multiplier) <= delta)


def classical_limit(delta: float) -> float:
    """The ε above which √(2 ln(1.25/δ))/ε times the sensitivity is too little noise for (ε, δ).

    >>> round(classical_limit(1e-5), 2)
    8.42
    """
    root = math.sqrt(2 * math.log(1.25 / delta))
    return _least(lambda epsilon: gaussian_delta(epsilon, root / epsilon) > delta)


def _least(enough: Callable[[float], bool]) -> float:
    """The least positive number from which on all are enough: to about 12 digits, never too small."""
    low, high = 1.0, 1.0
    while not enough(high):
        low, high = high, 2 * high
    while enough(low) and low > 1e-300:
        low, high = low / 2, low
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
