"""Additive noise on every entry of the gradient, the papers' DP-Gas and DP-Lap without clipping."""

from __future__ import annotations

from typing import Literal

from fedveil.clients.batch import ClientBatch
from fedveil.defenses.base import Defense, Strength
from fedveil.defenses.guarantee import Exposure, Guarantee
from fedveil.fields import NonNegative, declared
from fedveil.registry import defenses
from fedveil.tree import Tree

_WITHOUT_CLIPPING = Guarantee(
    "Formal guarantee: none is claimed; noise without a bound on the gradient has no finite privacy parameter."
)


class AdditiveNoise(Defense):
    """What Gaussian and Laplace noise share: everything but the draw.

    An attacker who knows the level of the noise has no better use for one update than to match it as it is: with equal
    noise on every entry that is the maximum-likelihood estimate. Shrinking layers by their share of signal was tried,
    and recovered 4 to 7 dB less.
    """

    reads_data = False
    matched_as_it_is = True
    weaknesses = ("Views of the same data in several rounds can be averaged.",)
    at: Literal["gradient", "upload"] = "gradient"

    @property
    def variance(self) -> float:
        """The variance of the noise on one entry."""
        raise NotImplementedError  # every subclass defines its own

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
    strength = Strength("sigma", "up")
    sigma: NonNegative = 1 / 255  # r in FedEM: standard deviation of the noise on every entry
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    @property
    def variance(self) -> float:
        """sigma²."""
        return self.sigma**2

    def protect(self, update: Tree, batch: ClientBatch) -> Tree:
        """g + N(0, sigma²), every entry anew."""
        return update.entrywise(lambda g: g.add_(batch.streams.normal_like(g), alpha=self.sigma))


@defenses.register("laplace-noise")
@declared
class LaplaceNoise(AdditiveNoise):
    """Add Laplace(0, scale) noise to every entry of the gradient.

    The papers' DP-Lap (FedEM: scale = 1/255). Without clipping this is no differential privacy.
    """

    paper = "DP-Lap, a baseline of FedEM and FedBARRE"
    strength = Strength("scale", "up")
    scale: NonNegative = 1 / 255  # r in FedEM: scale of the noise on every entry
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    @property
    def variance(self) -> float:
        """2·scale²."""
        return 2 * self.scale**2

    def protect(self, update: Tree, batch: ClientBatch) -> Tree:
        """g + Laplace(0, scale), every entry anew."""
        return update.entrywise(lambda g: g.add_(batch.streams.laplace_like(g), alpha=self.scale))
