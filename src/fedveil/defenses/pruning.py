"""Gradient pruning: share the largest entries of every gradient only."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength
from fedveil.defenses.masking import Share, support
from fedveil.fields import declared
from fedveil.registry import defenses
from fedveil.tree import Tree, matrix


@defenses.register("gradient-pruning")
@declared
class GradientPruning(Defense):
    """Keep the largest entries of the gradient by magnitude; zero the share `prune` of smaller ones.

    Each tensor on its own, or the whole gradient at once (`scope="model"`). At least one entry is kept. Of entries of
    equal size the first are kept: a random choice would show others in every round. What is held back is not made up
    for in later steps.
    """

    paper = "the gradient-pruning baseline of FedEM (Zhu et al., Deep Leakage from Gradients)"
    weaknesses = (
        "The largest entries, which say most about the data, go out exactly.",
        "Zeros give away which entries were pruned, and that they are small.",
    )
    strength = Strength("prune", "up", weak=0.9, strong=0.999, steps="rest")
    prune: Share = 0.99  # α in FedEM: share of the entries that are zeroed
    scope: Literal["tensor", "model"] = "tensor"  # each tensor on its own, or the whole gradient

    def protect(self, update: Tree, call: Call) -> Tree:
        """Each entry that is among the largest, or zero."""
        return self._pruned(update)

    def _pruned(self, update: Tree) -> Tree:
        if self.scope == "model":
            return update.unflat(self._largest(update.flat()))
        return update.map(lambda tensor: self._largest(matrix(tensor)).reshape(tensor.shape))

    def _largest(self, values: Tensor) -> Tensor:
        """The largest entries of every row (K, n), zeros elsewhere."""
        # 0.29 · 100 is 28.999… in floating point: a little more gives the counts as they are on paper.
        pruned = min(int(self.prune * values.shape[1] + 1e-9), values.shape[1] - 1)
        size = values.abs()
        smallest = size.kthvalue(pruned + 1, dim=1, keepdim=True).values
        larger, equal = size > smallest, size == smallest
        room = values.shape[1] - pruned - larger.sum(1, keepdim=True)
        kept = larger | (equal & (equal.cumsum(1) <= room))
        # NaN and infinity always pass: a zero in their place would hide a broken gradient from the server.
        return torch.where(kept | ~torch.isfinite(values), values, 0.0)

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Match on the observed support: entries that are exactly zero count nothing."""
        return Knowledge(target=observed, weight=support(observed))

    def measures(self, update: Tree) -> dict[str, float]:
        """Exact for one step: the share of entries kept, and the cosine, the root of the share of squares kept."""
        kept = self._pruned(update)
        share = kept.map(lambda tensor: (tensor != 0).to(torch.float64)).flat().mean(1)
        cosine = kept.norm() / update.norm().clamp_min(1e-30)
        return {
            "share of entries kept": float(share.mean()),
            "predicted cosine to the true gradient": float(cosine.mean()),
        }

    @property
    def random(self) -> bool:
        """No."""
        return False
