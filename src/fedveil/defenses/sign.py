"""Sign compression: share the signs of the gradient only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength, mean_tree, once_as_sent
from fedveil.defenses.densities import IMPOSSIBLE, Pair, either, summed
from fedveil.fields import Positive, declared
from fedveil.registry import defenses
from fedveil.tree import Tree, matrix, per_client

Flip = Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)]


@defenses.register("sign-compression")
@declared
class SignCompression(Defense):
    """Replace every entry of the gradient by its sign, times the mean magnitude of its tensor or a fixed `scale`.

    The papers leave the scale open. The mean |g| of each tensor is the one with the least squared error; a fixed
    number hides that too, and makes the length of a step independent of the gradient (signSGD). Zero stays zero.
    `flip` is our addition, to have a strength to sweep: each sign is turned with that probability.
    """

    paper = "the sign-compression baseline of FedEM (Bernstein et al., signSGD)"
    weaknesses = (
        "Signs alone keep most of the direction: the cosine to a Gaussian gradient is √(2/π) = 0.80.",
        "Entries that are exactly zero stay so, and give away inactive units.",
    )
    strength = Strength("flip", "up", weak=0.0, strong=0.45, steps="even")
    scale: Positive | None = None  # size of every entry; none: the mean |g| of each tensor
    flip: Flip = 0.0  # probability that a sign is turned

    def protect(self, update: Tree, call: Call) -> Tree:
        """sign(g) · scale."""

        def compress(g: Tensor) -> Tensor:
            signs = torch.sign(g)
            if self.flip:
                signs = signs * (1 - 2 * call.streams.chance_like(g, self.flip))
            # NaN and infinity pass: their sign would hide a broken gradient from the server.
            return torch.where(torch.isfinite(g), signs * self._scale(g), g)

        return update.map(compress)

    def _scale(self, g: Tensor) -> Tensor | float:
        return per_client(matrix(g).abs().mean(1), g) if self.scale is None else self.scale

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """sign · scale is the best guess at an entry; with flips, times 1 − 2·flip. Only the signs are right.

        What several local steps add up to has other signs than each of them.
        """
        share = 1 - 2 * self.flip
        weight = observed.map(lambda tensor: tensor.new_tensor(share).expand_as(tensor))
        return Knowledge(target=observed * share, weight=weight, signs=self._once(facts))

    def _once(self, facts: Facts) -> bool:
        """Whether an update is what was sent in a single step."""
        return facts.in_target(self.acts_at) is not None

    def together(self, views: Sequence[Knowledge], facts: Facts) -> Knowledge:
        """The size, times 2·P(positive) − 1 given how often each sign was sent."""
        if not self.flip or not once_as_sent(self, views, facts):
            return super().together(views, facts)
        sent = [each.target for each in views]
        votes, size = (mean_tree([view.map(part) for view in sent]) * len(sent) for part in (torch.sign, torch.abs))
        certain = (math.log1p(-self.flip) - math.log(self.flip)) / 2  # half the log odds of one message
        target = size.combine(votes, lambda total, vote: total / len(sent) * torch.tanh(certain * vote))
        return Knowledge(target, votes.map(lambda vote: torch.tanh(certain * vote).abs()), signs=True)

    def measures(self, update: Tree) -> dict[str, float]:
        """The cosine of sign(g)·s to g, Σ s|g| / (‖g‖·√Σ s²), exact for one step; flips multiply it by 1 − 2·flip."""
        signs = update.map(lambda g: torch.sign(g) * self._scale(g))
        cosine = signs.dot(update) / (signs.norm() * update.norm()).clamp_min(1e-30)
        return {"predicted cosine to the true gradient": float(cosine.mean()) * (1 - 2 * self.flip)}

    @property
    def random(self) -> bool:
        """Where signs may be turned."""
        return self.flip > 0

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """The chance of every sign; zero stays zero, and a scale of the tensor's own must be the candidate's."""

        def law(pair: Pair) -> Tensor:
            size = pair.given.abs().mean(1, keepdim=True)
            # Of an entry that is lost in rounding the sign is not known.
            lost = pair.given.abs() <= pair.blur(pair.given)
            right = either(pair.sent * pair.given > 0, math.log1p(-self.flip), math.log(self.flip))
            right = torch.where(lost, either(pair.given == 0, -IMPOSSIBLE, -math.log(2)), right)
            chance = torch.where(pair.sent == 0, either(lost, 0.0, -IMPOSSIBLE), right)
            if self.scale is not None:
                return chance
            # All entries of a tensor show one scale: it counts once, not once for every entry.
            shown = pair._replace(sent=pair.sent.abs().amax(1, keepdim=True), given=size)
            return chance + shown.spike(size) / pair.given.shape[1]

        return summed(observed, given, law)
