"""DP-Clip (FedCRAP's baseline): clip the update, then add Gaussian noise. Also what such mechanisms share."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength, trusting
from fedveil.defenses.clip import clipped
from fedveil.defenses.densities import gaussian
from fedveil.defenses.guarantee import ALL_DATA, Exposure, GaussianRelease, Guarantee
from fedveil.defenses.noise import noisy
from fedveil.fields import NonNegative, Positive, declared
from fedveil.registry import defenses
from fedveil.tree import Tree


class ClippedNoise(Defense):
    """What the local mechanisms share: bound the update, then add noise of a known level to every entry.

    They are local: any two updates that a client could send count as neighbors, so what bounds the update by C
    bounds the difference of two by 2C, and all data of the client is covered at once.
    """

    of = ("gradient", "delta")  # the norm of whole weights does not measure what a client adds
    weaknesses = (
        "Every further update spends more: ε grows with the rounds.",
        "Clipping hides the scale only; the direction, which a cosine attack matches, is hidden by the noise alone.",
    )
    clip: Positive
    order: Literal["l1", "l2"] = "l2"
    at: Literal["gradient", "upload"] = "gradient"

    def variance(self, size: int) -> float:
        """The variance of the noise on one entry of an update of `size` entries."""
        raise NotImplementedError  # every subclass defines its own

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """As it is, but for its size, which clipping may have changed, and for noise of a known level."""
        factor = facts.in_target(self.acts_at)
        if factor is None:
            return trusting(observed, bound=math.inf)
        bound = self.clip * factor if self.order == "l2" else math.inf
        return trusting(observed, variance=self.variance(observed.size) * factor**2, bound=bound)

    def measures(self, update: Tree) -> dict[str, float]:
        """Noise against the clipped signal, and the cosine that follows, mean over clients."""
        return noise_measures(update, self.clip, self.variance(update.size), self.order)


def noise_measures(update: Tree, clip: float, variance: float, order: Literal["l1", "l2"] = "l2") -> dict[str, float]:
    """Predicted effects of clipping to `clip` and adding noise of a variance: means over clients."""
    signal = clipped(update, clip, order).norm().double().clamp_min(1e-30)
    ratio = (variance * update.size) ** 0.5 / signal
    return {
        "noise-to-signal ratio": float(ratio.mean()),
        "predicted cosine to the true gradient": float((1 + ratio.square()).rsqrt().mean()),
    }


@defenses.register("dp-clip")
@declared
class DPClip(ClippedNoise):
    """Clip each client's update to the norm `clip`, then add N(0, sigma²) to every entry.

    FedCRAP's DP-Clip. It is a Gaussian mechanism of sensitivity 2·clip, so its noise multiplier is sigma/(2·clip):
    at the usual small sigma the ε that the ledger states is enormous. Without noise (sigma = 0) nothing is promised.
    """

    paper = "the DP-Clip baseline of FedCRAP"
    promises = "ε at δ for all data of a client, from sigma/(2·clip)"
    strength = Strength("sigma", "up", weak=1e-3, strong=1.0)
    clip: Positive = 1.0  # C in FedCRAP: largest norm of an update
    sigma: NonNegative = 0.01  # standard deviation of the noise on every entry
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    def variance(self, size: int) -> float:
        """sigma²."""
        return self.sigma**2

    def protect(self, update: Tree, call: Call) -> Tree:
        """g · min(1, clip/‖g‖) + N(0, sigma²)."""
        return noisy(clipped(update, self.clip), self.sigma, call.streams.normal_like)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """A Gaussian mechanism of sensitivity 2·clip in every release."""
        if self.sigma == 0:
            return Guarantee("Formal guarantee: none; clipping without noise is not differentially private.")
        multiplier = self.sigma / (2 * self.clip)
        return Guarantee(
            f"Formal guarantee: each release is a Gaussian mechanism with noise {multiplier:.3g} times the greatest "
            "distance of two updates; ε grows with every release.",
            formal=True,
            protects=ALL_DATA,
            mechanism=GaussianRelease(multiplier, exposure.uses(self.acts_at)),
        )

    @property
    def random(self) -> bool:
        """With any noise at all."""
        return self.sigma > 0

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Gaussian around what came in, clipped."""
        return gaussian(observed, clipped(given, self.clip), self.sigma)
