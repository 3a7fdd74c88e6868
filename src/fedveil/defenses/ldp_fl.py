"""LDP-FL (Sun et al.): Duchi's mechanism in a range of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Self

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength
from fedveil.defenses.densities import Pair, log_odds_of_two, summed
from fedveil.defenses.duchi import duchi, range_factor, signal_prior
from fedveil.defenses.guarantee import Exposure, Guarantee
from fedveil.defenses.ldp import Epsilon, per_coordinate, precision_measures, randomized
from fedveil.errors import FedveilError
from fedveil.fields import Positive, declared
from fedveil.registry import defenses
from fedveil.tree import Tree, matrix, per_client

Finite = Annotated[float, Field(allow_inf_nan=False)]


@defenses.register("ldp-fl")
@declared
class LDPFL(Defense):
    """Send center ± radius·C for every entry of a layer, with C = (e^ε+1)/(e^ε−1) and odds that make the mean right.

    Duchi's mechanism on t = (ω − c)/r, clamped to [−1, 1]. The center c and the radius r are set beforehand and known
    to everyone: one range for all layers, or with `centers` and `radii` one for each of the model's parameter tensors,
    in their order. They must not be taken from private weights: those that the server sends first, or those of a model
    trained on public data, show the ranges. `adaptive` takes them from each client's own layer, the middle and half
    the width of its values, so nothing is clamped; that range then goes out exactly, and with it the layer's largest
    and smallest value. A layer whose entries are all equal, or that has one entry only, goes out as it is.

    The paper also splits updates into single weights and shuffles them over clients on the way, to hide which of
    them belong together. That is a matter of the transport and not part of this class: the composed ε here is that
    of a receiver who sees whose weights they are.
    """

    place = "upload"
    of = ("weights", "delta")
    paper = "Sun et al., LDP-FL: Practical Private Aggregation in Federated Learning with Local Differential Privacy"
    promises = "ε-LDP of each entry within a range, per round"
    weaknesses = (
        "Every entry goes out with at least the radius: few clients cannot average that away.",
        "With a fixed range, entries outside are cut, which biases them; one range for all layers fits few of them.",
        "With adaptive, each layer's largest and smallest value can be read off what is sent.",
        "The paper's claim to escape the number of weights rests on shuffling by a trusted party, which is not here.",
        "ε is per entry and round: composed over a model it is no protection.",
    )
    strength = Strength("epsilon", "down", weak=8.0, strong=0.3)
    epsilon: Epsilon = 0.3  # ε in the paper: the budget of each entry and round
    center: Finite = 0.0  # c in the paper: middle of the range of entries
    radius: Positive = 0.1  # r in the paper: half the width of that range
    centers: tuple[Finite, ...] = ()  # c of every parameter tensor, in place of the one for all
    radii: tuple[Positive, ...] = ()  # r of every parameter tensor, in place of the one for all
    adaptive: bool = False  # c and r from the layer itself, in place of all these fields

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.adaptive and (self.centers or self.radii):
            raise ValueError("adaptive takes ranges from the layers themselves: leave centers and radii out, or it")
        return self

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """One center and one radius for every parameter, where they are given one by one."""
        for field in ("centers", "radii"):
            given = len(getattr(self, field))
            if given and given != len(parameters):
                raise FedveilError(
                    f"ldp-fl: {field} has {given} numbers, but the model has {len(parameters)} parameter tensors: "
                    f"{', '.join(parameters)}"
                )

    def protect(self, update: Tree, call: Call) -> Tree:
        """c + r·duchi((ω − c)/r), every entry anew."""

        def mechanism(name: str | None = None) -> Callable[[Tensor], Tensor]:
            def perturb(value: Tensor) -> Tensor:
                if self.adaptive:
                    low, high = matrix(value).amin(1), matrix(value).amax(1)
                    center, radius = per_client((low + high) / 2, value), per_client((high - low) / 2, value)
                else:
                    fixed = (self.center, self.radius) if name is None else ranges[name]
                    center, radius = value.new_tensor(fixed[0]), value.new_tensor(fixed[1])
                t = ((value - center) / radius).nan_to_num(0.0)  # a radius of 0 leaves the center
                return center + radius * duchi(t, self.epsilon, call.streams)

            return randomized(perturb)

        ranges = self._ranges(update)
        if not (self.adaptive or self.centers or self.radii):
            return update.entrywise(mechanism())
        return Tree({name: mechanism(name)(tensor) for name, tensor in update.items()})

    def _ranges(self, update: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """The center and the radius of every tensor, as they are set beforehand."""
        self.check_parameters(update)
        centers = self.centers or [self.center] * len(update)
        radii = self.radii or [self.radius] * len(update)
        return dict(zip(update, zip(centers, radii, strict=True), strict=True))

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """ε of each entry in each round, composed over the run; an adaptive range is not covered."""
        if self.adaptive:
            remark = "this holds within each layer's range, which goes out exactly and is not covered"
            protects = "the place of each entry in its layer's range, the range being public"
        else:
            remark = "any two values of one entry are covered, its range being set beforehand"
            protects = "the value of each entry"
        return per_coordinate(self.epsilon, exposure, each="entry", protects=protects, remark=remark)

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Shrunk towards the center by the share of signal; trusted by that share and by each tensor's precision.

        As for Duchi, the share takes entries as uniform in the range. A tensor with a small radius has little noise:
        tensors are trusted by the inverse of their noise's variance, which is in proportion to r². An adaptive range
        shows: what is sent has two values in a tensor, with the center halfway; one without spread was sent as it is.

        On weights the shrinking is towards w_t, a gradient of zero: the center says nothing about the change. Weights
        near the ends of the range are more certain, but next to one step's change all of them are noise: not used.
        """
        share, ranges = signal_prior(self.epsilon), self._ranges(observed)

        def middle(name: str, tensor: Tensor) -> Tensor:
            if facts.kind == "weights":
                return torch.zeros_like(tensor)
            if not self.adaptive:
                center = ranges[name][0]
                return torch.full_like(tensor, center if facts.kind == "gradient" else -center / facts.step_scale)
            low, high = matrix(tensor).amin(1), matrix(tensor).amax(1)
            return per_client((low + high) / 2, tensor).expand_as(tensor)

        centers = Tree({name: middle(name, tensor) for name, tensor in observed.items()})
        around = observed - centers
        if self.adaptive:
            trust = _precision(around, share)
        else:
            least = min(radius for _, radius in ranges.values())
            trust = Tree({n: torch.full_like(t, share * (least / ranges[n][1]) ** 2) for n, t in observed.items()})
        return Knowledge(target=centers + around * share, weight=trust)

    def measures(self, update: Tree) -> dict[str, float]:
        """The range and the standard deviation √(r²C² − (ω−c)²), at the center where it is largest.

        The radius of the fields, over all entries in root mean square: an adaptive one is each layer's own.
        """
        factor, ranges = range_factor(self.epsilon), self._ranges(update)
        squares = sum(update[name][0].numel() * radius**2 for name, (_, radius) in ranges.items())
        radius = math.sqrt(squares / update.size) if self.radii else self.radius
        return precision_measures(factor, radius * factor, radius)

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """The chance of the one of two values that was sent; an adaptive range must be the candidate's own, too."""
        ranges, factor = self._ranges(given), range_factor(self.epsilon)

        def law(pair: Pair) -> Tensor:
            if not self.adaptive:
                center, radius = ranges[pair.name]
                return log_odds_of_two((pair.given - center) / radius, pair.sent > center, self.epsilon)
            low, high = pair.given.amin(1, keepdim=True), pair.given.amax(1, keepdim=True)
            middle, reach = (low + high) / 2, (high - low) / 2
            upper = pair.sent > middle
            value = middle + torch.where(upper, reach, -reach) * factor
            # All entries of a tensor show one range: it counts once, not once for every entry.
            fit = pair.spike(value).mean(1, keepdim=True)
            t = ((pair.given - middle) / reach).nan_to_num(0.0)
            odds = torch.where(reach > 0, log_odds_of_two(t, upper, self.epsilon), 0.0)
            return odds + fit / pair.given.shape[1]

        return summed(observed, given, law)


def _precision(around: Tree, share: float) -> Tree:
    """Each tensor's precision over that of the client's most precise noisy tensor, times the share."""
    spread = {name: matrix(tensor).square().mean(1) for name, tensor in around.items()}  # (K,) each
    stacked = torch.stack(list(spread.values()))
    least = torch.where(stacked > 0, stacked, torch.inf).amin(0)

    def weight(name: str, tensor: Tensor) -> Tensor:
        own = spread[name]
        trust = torch.where(own > 0, share * least / own, torch.ones_like(own))
        return per_client(trust, tensor).expand_as(tensor)

    return Tree({name: weight(name, tensor) for name, tensor in around.items()})
