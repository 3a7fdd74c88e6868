"""The calibrated Laplace mechanism (DP-Lap in FedBARRE's sweep of ε): the noise follows from ε."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fedveil.defenses.base import Call, Facts, Strength
from fedveil.defenses.clip import clipped
from fedveil.defenses.densities import laplace
from fedveil.defenses.dp_clip import ClippedNoise
from fedveil.defenses.guarantee import ALL_DATA, Exposure, Guarantee, LaplaceRelease
from fedveil.defenses.noise import noisy
from fedveil.fields import Positive, declared
from fedveil.registry import defenses
from fedveil.tree import Tree


@defenses.register("dp-laplace")
@declared
class DPLaplace(ClippedNoise):
    """Clip each client's update to the L1 norm `clip`, then add Laplace noise of scale 2·clip/epsilon.

    Local: any two updates are neighbors, so the sensitivity in L1 is 2·clip. With an L2 clip (`order=l2`) it is
    2·clip·√d for d entries, and the noise grows with it. There is no δ: ε holds without exception.
    """

    paper = "the DP-Lap baseline of FedBARRE; Dwork et al. 2006"
    promises = "epsilon for all data of a client, per release"
    strength = Strength("epsilon", "down", weak=1e6, strong=1.0)
    epsilon: Positive = 8.0  # ε in the papers: the budget of one release
    clip: Positive = 1.0  # C in the papers: largest norm of an update
    order: Literal["l1", "l2"] = "l1"  # in which norm an update is clipped
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    def scale(self, size: int) -> float:
        """The scale of the noise on one entry of an update of `size` entries."""
        return 2 * self.clip / self.epsilon * (1.0 if self.order == "l1" else size**0.5)

    def variance(self, size: int) -> float:
        """2·scale²."""
        return 2 * self.scale(size) ** 2

    def protect(self, update: Tree, call: Call) -> Tree:
        """g · min(1, clip/‖g‖) + Laplace(0, scale)."""
        return noisy(clipped(update, self.clip, self.order), self.scale(update.size), call.streams.laplace_like)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """epsilon in every release."""
        return Guarantee(
            f"Formal guarantee: ε = {self.epsilon:g} in every single release, for any two updates that a client could "
            "send; ε grows with every release.",
            formal=True,
            protects=ALL_DATA,
            mechanism=LaplaceRelease(self.epsilon, exposure.uses(self.acts_at)),
        )

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Laplace around what came in, clipped."""
        return laplace(observed, clipped(given, self.clip, self.order), self.scale(given.size))
