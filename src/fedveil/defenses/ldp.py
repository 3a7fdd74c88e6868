"""What the mechanisms of local differential privacy share: exact draws, and what ε per entry amounts to over a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Strength
from fedveil.defenses.guarantee import Exposure, Guarantee, PureLDP
from fedveil.fields import Positive, declared
from fedveil.streams import Streams
from fedveil.tree import Tree

# Below this the noise is useless, and its moments overflow.
Epsilon = Annotated[float, Field(ge=1e-9, allow_inf_nan=False)]


def randomized(mechanism: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Run a mechanism in double precision on the CPU, with the result in the tensor's own type.

    Draws in single precision are multiples of 2^-24: a sign that must flip with probability e^-ε would never do so
    from ε = 17 on, and the likelihood ratio would be infinite. NaN and infinity pass, for the server to refuse.
    """

    def apply(value: Tensor) -> Tensor:
        drawn = mechanism(value.cpu().double()).to(value)
        return drawn if torch.isfinite(value.sum()) else torch.where(torch.isfinite(value), drawn, value)

    return apply


def per_coordinate(epsilon: float, exposure: Exposure, *, each: str, protects: str, remark: str) -> Guarantee:
    """ε of one entry in one release; the ledger composes it over all entries and releases of a client.

    The remark says what is and is not covered; it must appear wherever the number does.
    """
    unit = "round" if exposure.rounds and exposure.steps_per_round == 1 else "update"
    return Guarantee(
        f"Formal guarantee: ε = {epsilon:g} per {each} and {unit}; {remark}.",
        formal=True,
        protects=protects,
        mechanism=PureLDP(epsilon, coordinates=exposure.parameters),
        caveat=f"{remark[0].upper()}{remark[1:]}.",
    )


@declared
class BoundedMechanism(Defense):
    """What Duchi and PM share: a mechanism for values in [−1, 1], applied to entries of up to ±bound.

    Entries are clamped to [−bound, bound] and scaled by it, so beyond the bound the mean is the bound. One bound
    serves all layers: for weights or their change, not for the gradients of FedSGD.
    """

    place = "upload"
    of = ("weights", "delta")
    promises = "ε-LDP of each entry, per round"
    strength = Strength("epsilon", "down", weak=8.0, strong=0.3)
    epsilon: Epsilon = 0.3  # ε in the papers: the budget of each entry and round
    bound: Positive = 1.0  # entries are clamped to ±bound

    def draw(self, t: Tensor, streams: Streams) -> Tensor:
        """What is sent for every entry of t in [−1, 1]."""
        raise NotImplementedError  # every mechanism defines its own

    def protect(self, update: Tree, call: Call) -> Tree:
        """bound·draw(ω/bound), every entry anew."""
        mechanism = randomized(lambda value: self.bound * self.draw(value / self.bound, call.streams))
        return update.entrywise(mechanism)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """ε of each entry in each round."""
        remark = "any two values of one entry are covered"
        return per_coordinate(self.epsilon, exposure, each="entry", protects="the value of each entry", remark=remark)


def precision_measures(range_factor: float, deviation: float, reach: float) -> dict[str, float]:
    """How rough an unbiased mechanism is: for the report."""
    return {
        "range factor C": range_factor,
        "predicted standard deviation of an entry": deviation,
        "clients whose mean has a standard deviation of a tenth of the range": (deviation / (0.1 * reach)) ** 2,
    }
