"""Additive noise on every entry of the gradient, the papers' DP-Gas and DP-Lap without clipping."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength, trusting
from fedveil.defenses.densities import gaussian, laplace
from fedveil.defenses.guarantee import Exposure, Guarantee
from fedveil.errors import FedveilError
from fedveil.fields import LARGEST, NonNegative, declared
from fedveil.registry import defenses
from fedveil.tree import Tree, matrix

log = logging.getLogger("fedveil")
LOST = 0.5  # warn the user if at least this share of the entries goes out unchanged
_LOOKED_AT = 10_000  # entries of a tensor from which that share is estimated

_WITHOUT_CLIPPING = Guarantee(
    "Formal guarantee: none is claimed; noise without a bound on the gradient has no finite privacy parameter."
)


def noisy(update: Tree, scale: float, draw: Callable[[Tensor], Tensor]) -> Tree:
    """The update plus `scale` times draws of scale 1, every entry anew.

    Half precision gets its noise in float32 and is rounded afterwards: what the noise promises survives rounding.
    The user is told where rounding swallows most of the noise.
    """
    if not scale <= LARGEST:
        raise FedveilError(f"noise of scale {scale:.3g} is beyond the largest float32, {LARGEST:.3g}: use less noise")
    found = update.entrywise(lambda g: g.add_(draw(g), alpha=scale))
    if scale:
        tell_lost_noise(update, found, f"noise of scale {scale:.3g}")
    return found


def tell_lost_noise(update: Tree, found: Tree, noise: str) -> None:
    """Warn, once, of noise so small that rounding leaves most entries of the update as they were.

    It is not an error: what noise promises holds for rounded numbers too. But whoever adds noise expects a change.
    """
    before, after = ([matrix(tensor)[:1, :_LOOKED_AT] for tensor in tree.values()] for tree in (update, found))
    for dtype in {tensor.dtype for tensor in before}:
        pairs = [pair for pair in zip(before, after, strict=True) if pair[0].dtype == dtype]
        lost = torch.cat([(old == new).flatten() for old, new in pairs]).double().mean()
        if lost > LOST:
            _warn_once(noise, str(dtype).removeprefix("torch."), round(100 * float(lost)))


@cache
def _warn_once(noise: str, dtype: str, percent: int) -> None:
    log.warning(
        "%s is lost in %s: rounding sends %d %% of the entries out as they were; use more noise or wider numbers",
        noise,
        dtype,
        percent,
    )


class AdditiveNoise(Defense):
    """What Gaussian and Laplace noise share: everything but the draw.

    An attacker who knows the level of the noise matches the update as it is, and no closer than the noise allows: with
    equal noise on every entry the squared distance is the likelihood, and a prior on pictures stands beside it in the
    right proportion. Shrinking layers by their share of signal was tried, and recovered 4 to 7 dB less.
    """

    weaknesses = ("Views of the same data in several rounds can be averaged.",)
    at: Literal["gradient", "upload"] = "gradient"

    @property
    def variance(self) -> float:
        """The variance of the noise on one entry."""
        raise NotImplementedError  # every subclass defines its own

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """As it is; the level of the noise tells how closely it is to be matched."""
        factor = facts.in_target(self.acts_at)
        return trusting(observed, variance=None if factor is None else self.variance * factor**2)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """None: the sensitivity of an unclipped gradient has no bound."""
        return _WITHOUT_CLIPPING

    def measures(self, update: Tree) -> dict[str, float]:
        """Predicted cosine between the shared and the true gradient: 1/√(1 + variance·d/‖g‖²), mean over clients."""
        ratio = self.variance * update.size / update.norm().square().clamp_min(1e-30)
        return {"predicted cosine to the true gradient": float((1 + ratio).rsqrt().mean())}


@defenses.register("gaussian-noise")
@declared
class GaussianNoise(AdditiveNoise):
    """Add N(0, sigma²) to every entry of the gradient.

    The papers' DP-Gas (FedEM: sigma = 1/255; Gradient Dropout calls it "DP-SGD"). Without clipping this is no
    differential privacy.
    """

    paper = "DP-Gas, a baseline of FedEM, Gradient Dropout and FedBARRE"
    strength = Strength("sigma", "up", weak=1 / 255, strong=1.0)
    sigma: NonNegative = 1 / 255  # r in FedEM: standard deviation of the noise on every entry
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    @property
    def variance(self) -> float:
        """sigma²."""
        return self.sigma**2

    def protect(self, update: Tree, call: Call) -> Tree:
        """g + N(0, sigma²), every entry anew."""
        return noisy(update, self.sigma, call.streams.normal_like)

    @property
    def random(self) -> bool:
        """With any noise at all."""
        return self.sigma > 0

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Gaussian around what came in."""
        return gaussian(observed, given, self.sigma)


@defenses.register("laplace-noise")
@declared
class LaplaceNoise(AdditiveNoise):
    """Add Laplace(0, scale) noise to every entry of the gradient.

    The papers' DP-Lap (FedEM: scale = 1/255). Without clipping this is no differential privacy.
    """

    paper = "DP-Lap, a baseline of FedEM and FedBARRE"
    strength = Strength("scale", "up", weak=1 / 255, strong=1.0)
    scale: NonNegative = 1 / 255  # r in FedEM: scale of the noise on every entry
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    @property
    def variance(self) -> float:
        """2·scale²."""
        return 2 * self.scale**2

    def protect(self, update: Tree, call: Call) -> Tree:
        """g + Laplace(0, scale), every entry anew."""
        return noisy(update, self.scale, call.streams.laplace_like)

    @property
    def random(self) -> bool:
        """With any noise at all."""
        return self.scale > 0

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Laplace around what came in."""
        return laplace(observed, given, self.scale)
