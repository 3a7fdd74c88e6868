"""Additive noise on every entry of the gradient, the papers' DP-Gas and DP-Lap without clipping."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch
from fedveil.defenses.base import Defense, Facts, Knowledge, Strength
from fedveil.defenses.guarantee import Exposure, Guarantee
from fedveil.fields import NonNegative, declared
from fedveil.registry import defenses
from fedveil.tree import Tree, per_client

_WITHOUT_CLIPPING = Guarantee(
    "Formal guarantee: none is claimed; noise without a bound on the gradient has no finite privacy parameter."
)


class AdditiveNoise(Defense):
    """What Gaussian and Laplace noise share: everything but the draw."""

    paper = "the additive-noise baselines of FedEM, Gradient Dropout and FedBARRE"
    weaknesses = (
        "An attacker who knows the level of the noise leaves out the layers that drown in it.",
        "Views of the same data in several rounds can be averaged.",
    )
    at: Literal["gradient", "upload"] = "gradient"

    @property
    def variance(self) -> float:
        """The variance of the noise on one entry."""
        raise NotImplementedError  # every subclass defines its own

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """None: the sensitivity of an unclipped gradient has no bound."""
        return _WITHOUT_CLIPPING

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Shrink every tensor towards zero by its own share of signal, and trust it by that share.

        The signal's variance is what the observed spread exceeds the noise by: the shrunk value is the posterior
        mean of an entry under a Gaussian prior with that variance.
        """
        share = observed.map(lambda tensor: signal_share(tensor, self.variance))
        return Knowledge(
            target=observed.combine(share, torch.mul),
            weight=observed.combine(share, lambda tensor, factor: factor.expand_as(tensor)),
        )

    def measures(self, update: Tree) -> dict[str, float]:
        """Predicted cosine between the shared and the true gradient: 1/√(1 + variance·d/‖g‖²), mean over clients."""
        ratio = self.variance * update.size / update.norm().square().clamp_min(1e-30)
        return {"predicted cosine to the true gradient": float((1 + ratio).rsqrt().mean())}


def signal_share(tensor: Tensor, variance: float) -> Tensor:
    """Per client: the share of a noisy tensor's spread that is not noise, shaped to multiply it."""
    spread = tensor.flatten(1).square().mean(1)
    return per_client(((spread - variance) / spread.clamp_min(1e-30)).clamp(0, 1), tensor)


@defenses.register("gaussian-noise")
@declared
class GaussianNoise(AdditiveNoise):
    """Add N(0, sigma²) to every entry of the gradient.

    The papers' DP-Gas (FedEM: sigma = 1/255; Gradient Dropout calls it "DP-SGD"). Without clipping this is no
    differential privacy.
    """

    strength = Strength("sigma", "up")
    sigma: NonNegative = 1 / 255  # r in FedEM
    at: Literal["gradient", "upload"] = "gradient"

    @property
    def variance(self) -> float:
        """sigma²."""
        return self.sigma**2

    def protect(self, update: Tree, batch: ClientBatch) -> Tree:
        """g + N(0, sigma²), every entry anew."""
        return update.map(lambda g: g + self.sigma * batch.streams.normal_like(g))


@defenses.register("laplace-noise")
@declared
class LaplaceNoise(AdditiveNoise):
    """Add Laplace(0, scale) noise to every entry of the gradient.

    The papers' DP-Lap (FedEM: scale = 1/255). Without clipping this is no differential privacy.
    """

    strength = Strength("scale", "up")
    scale: NonNegative = 1 / 255  # r in FedEM
    at: Literal["gradient", "upload"] = "gradient"

    @property
    def variance(self) -> float:
        """2·scale²."""
        return 2 * self.scale**2

    def protect(self, update: Tree, batch: ClientBatch) -> Tree:
        """g + Laplace(0, scale), every entry anew."""
        return update.map(lambda g: g + self.scale * batch.streams.laplace_like(g))
