"""PPFA (Zhang et al.): distort the update by a set length, in the direction that costs the model least."""

from __future__ import annotations

import dataclasses
from typing import Literal, Self

import pydantic
import torch
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, MessageKind, Strength
from fedveil.defenses.densities import spike, squared_distance
from fedveil.fields import NonNegative, Positive, Probability, Repeats, declared
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree, at_least_single

_ROUNDING = 1e-9  # 1 − 0.2 − 0.8 is not quite 0


@defenses.register("ppfa")
@declared
class PPFA(Defense):
    """Add a distortion of norm 4·diameter·(1 − c − epsilon) to the update, where it raises the local loss least.

    Our reading of a learned parameter distortion under a leakage budget epsilon. From a random direction, projected
    gradient descent lowers the loss of the client's last batch at the distorted weights, at constant norm; with
    `direction="random"` the random direction stays. The norm is in units of what is sent, so set `diameter` for
    each study: the papers' results differ by as much as another diameter would explain.

    On upload it protects weights or their change. FedSGD shares gradients: there `at="gradient"` distorts the
    gradient of a step, by the direction that harms least when the server moves the weights against it (under FedAvg:
    in every local step).
    """

    place = "upload"
    paper = "Zhang et al., Theoretically principled federated learning for balancing privacy and utility"
    weaknesses = (
        "The direction that raises the loss least is that of the gradient itself: the longer it is searched for, the "
        "less the distortion hides.",
        "The epsilon is the budget of a bound on leakage, not that of differential privacy.",
        "A distortion of one size over all entries hides the layers with small updates only.",
    )
    strength = Strength("epsilon", "down", weak=0.995, strong=0.2, steps="rest")
    epsilon: Probability = 0.8  # ε in the paper: leakage budget; FedEM: 0.8, 0.97 to 0.995; FedBARRE: 0.05 to 0.95
    diameter: Positive = 1.0  # D in the paper: diameter of the data, which scales the distortion
    c: NonNegative = 0.0  # c in the paper: regret of the attacker's optimizer
    direction: Literal["pgd", "random"] = "pgd"  # searched for where it harms least, or left at random
    steps: Repeats = 10  # steps of that search
    lr: Positive = 0.1  # length of such a step, against the unit gradient, as a share of the norm
    at: Literal["gradient", "upload"] = "upload"  # the gradient of every step, or once what is uploaded

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.epsilon + self.c > 1 + _ROUNDING:
            raise ValueError(
                f"epsilon must be at most 1 - c, here {max(1 - self.c, 0):g}: beyond it the distortion would have a "
                f"negative norm (got {self.epsilon:g})"
            )
        return self

    @property
    def of(self) -> tuple[MessageKind, ...]:  # type: ignore[override]
        """What it can protect where it acts: on upload, the sign of a gradient would be taken for that of weights."""
        return ("gradient",) if self.at == "gradient" else ("weights", "delta")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """A random direction needs no data."""
        return frozenset({"batch"}) if self.direction == "pgd" else frozenset()

    @property
    def norm(self) -> float:
        """Δ = 4D(1 − c − ε)."""
        return 4 * self.diameter * max(1 - self.c - self.epsilon, 0.0)

    def protect(self, update: Tree, call: Call) -> Tree:
        """The update plus a distortion of norm Δ."""
        if self.norm < 4 * self.diameter * _ROUNDING:
            return update
        # Half precision is too coarse to keep the norm of a long distortion.
        wide = update.map(at_least_single)
        distortion = _to_norm(wide.map(call.streams.normal_like), self.norm)
        if self.direction == "pgd":
            batch = call.require_batch(self.name, "choose direction='random', or at='gradient'")
            sign = -1.0 if self.at == "gradient" else 1.0  # the server moves the weights against a gradient
            for _ in range(self.steps if batch.targets.shape[1] else 0):  # a sampling defense may leave a batch empty
                moved = (batch.params.map(at_least_single) + sign * distortion).like(batch.params)
                slope = batch.gradient(params=moved).map(at_least_single) * sign
                distortion = _to_norm(distortion - _to_norm(slope, self.lr * self.norm), self.norm)
        return (wide + distortion).like(update)

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """The update as it came, every entry trusted alike.

        A distortion in a random direction spreads evenly over all entries, so that no other match is likelier; one
        that was searched for is in part the gradient itself. To shrink each layer by its share of signal costs the
        attacker 6 to 8 dB (lenet on digits).
        """
        return super().knowledge(observed, facts)

    def measures(self, update: Tree) -> dict[str, float]:
        """The norm of the distortion; for gradients also the cosine 1/√(1 + Δ²/‖g‖²) if its direction is random."""
        found = {"norm of the distortion": self.norm}
        if self.at == "gradient" and self.direction == "random":
            ratio = self.norm**2 / update.norm().square().clamp_min(1e-30)
            found["predicted cosine to the true gradient"] = float((1 + ratio).rsqrt().mean())
        return found

    @property
    def random(self) -> bool:
        """With any distortion at all: its direction starts at random."""
        return self.norm >= 4 * self.diameter * _ROUNDING

    def resent(self, given: Tree, facts: Facts, streams: Streams) -> Tree:
        """One at the same distance, in a random direction: the density asks for the distance alone."""
        return dataclasses.replace(self, direction="random").protect(given, Call(streams))

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """What was sent lies at the distance Δ from what came in, exactly but for rounding.

        The direction is left out. One at random is equally likely to be any; one that was searched for is not, but to
        a candidate at another distance no direction leads at all.
        """
        distance = squared_distance(observed, given).sqrt()
        length = squared_distance(observed, observed * 0.0).sqrt()
        eps = max(torch.finfo(tensor.dtype).eps for tensor in observed.values())
        return spike(distance - self.norm, eps * (length + self.norm), length + distance + self.norm)


def _to_norm(tree: Tree, norm: float) -> Tree:
    """Each client's tensors scaled to a norm; zeros stay zeros."""
    return tree * (norm / tree.norm().clamp_min(1e-30))
