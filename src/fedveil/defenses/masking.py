"""Gradient masking: zero a random part of every gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength, once_as_sent
from fedveil.defenses.densities import Pair, either, summed
from fedveil.fields import declared
from fedveil.registry import defenses
from fedveil.tree import Tree

Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


@defenses.register("gradient-masking")
@declared
class GradientMasking(Defense):
    """Zero each entry of the gradient with probability `share`; the others go out as they are.

    Drawn anew for every entry and step, without rescaling (FedEM's text baseline: 25 %).
    """

    paper = "the gradient-masking baseline of FedEM"
    weaknesses = (
        "Entries that are not zeroed go out exactly, and zeros give away which ones were.",
        "Views of the same data in several rounds fill each other's gaps.",
    )
    strength = Strength("share", "up", weak=0.1, strong=0.9, steps="even")
    share: Share = 0.25  # probability that an entry is zeroed

    def protect(self, update: Tree, call: Call) -> Tree:
        """Each entry, or zero."""

        # NaN and infinity become NaN, masked or not: a zero in their place would hide a broken gradient. Adding 0 makes
        # every zero a positive one: −0.0 would give the sign of a masked entry away.
        return update.entrywise(lambda g: (g * (1 - call.streams.chance_like(g, self.share))).add_(0.0))

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Match on the observed support: entries that are exactly zero count nothing.

        Over n local steps an entry is masked in some of them: one that is not zero has on average
        (1 − share)/(1 − shareⁿ) of its value left, and is scaled back. For a single step that factor is 1.
        """
        left = (1 - self.share) / (1 - self.share**facts.steps)
        return Knowledge(target=observed / left, weight=support(observed))

    def together(self, views: Sequence[Knowledge], facts: Facts) -> Knowledge:
        """What any of the messages shows: each fills the gaps of the others, and what it shows is exact."""
        found = super().together(views, facts)
        if not once_as_sent(self, views, facts):
            return found
        return replace(found, weight=found.weight.map(lambda tensor: (tensor > 0).to(tensor.dtype)))

    def measures(self, update: Tree) -> dict[str, float]:
        """Predicted share of entries kept and cosine, √(1 − share)."""
        return {
            "share of entries kept": 1 - self.share,
            "predicted cosine to the true gradient": (1 - self.share) ** 0.5,
        }

    @property
    def random(self) -> bool:
        """Unless nothing is masked."""
        return self.share > 0

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Zero, or what came in exactly."""

        def law(pair: Pair) -> Tensor:
            kept = math.log1p(-self.share) + pair.spike(pair.given)
            zero = either(pair.given == 0, 0.0, math.log(self.share))
            return torch.where(pair.sent == 0, zero, kept)

        return summed(observed, given, law)


def support(observed: Tree) -> Tree:
    """1 where an entry is not exactly zero, 0 where it is."""
    return observed.map(lambda tensor: (tensor != 0).to(tensor.dtype))
