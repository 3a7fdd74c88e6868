"""Soteria (Sun et al.): hide the features of a fully connected layer that give the input away."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength
from fedveil.defenses.masking import Share
from fedveil.errors import FedveilError
from fedveil.fields import Count, declared
from fedveil.registry import defenses
from fedveil.tree import Tree, at_least_single


@defenses.register("soteria")
@declared
class Soteria(Defense):
    """Zero the columns of a linear layer's gradient that belong to the features with the lowest ‖∂r/∂x‖/|r|.

    With r the features that the layer takes in, feature i has the score Σ ‖∂r_i/∂x‖/|r_i| over the batch; the columns
    whose score is below the `prune` quantile are zeroed. The forward pass and all other gradients stay as they are.
    An example with r_i = 0 adds nothing to the score, as it adds nothing to that column. Under dropout the features
    come from another mask than the gradient.

    In a network of convolutions and entrywise functions, as `lenet` is, all scores together cost some dozens of steps.
    In others each feature takes a backward pass: `features` scores a random part of them only, drawn anew each step,
    and zeroes the share `prune` of that part.
    """

    revision = 2  # scores round otherwise

    needs = frozenset({"batch", "linear layer"})
    paper = "Sun et al., Provable Defense against Privacy Leakage in Federated Learning from Representation Perspective"
    weaknesses = (
        "All other layers go out exactly: leaving this one out undoes the defense.",
        "Zeroed columns give away which layer and which features were hidden.",
    )
    strength = Strength("prune", "up", weak=0.04, strong=0.8, steps="even")
    prune: Share = 0.8  # p in the paper: share of the features that are zeroed; Gradient Dropout sweeps 0.04 to 0.8
    layer: str | None = None  # name of the linear layer; none: the last one of the model
    features: Count | None = None  # how many to score; none: all

    def protect(self, update: Tree, call: Call) -> Tree:
        """The gradient with some columns of one weight zeroed."""
        batch = call.require_batch(self.name)
        name = linear_layer(batch.engine.model, self.layer, update)
        if self.prune == 0 or not batch.targets.shape[1]:  # a sampling defense may leave a batch empty
            return update
        if not batch.perturbed.is_floating_point():
            raise FedveilError("soteria takes derivatives in the inputs, which are whole numbers here: use embeddings")
        weight = _weight_of(name)
        width = update[weight].shape[-1]
        if self.features is None or self.features >= width:
            chosen = torch.arange(width).expand(batch.count, width)
        else:
            chosen = call.streams.permutation(width)[:, : self.features]
        chosen = chosen.to(update[weight].device)
        score = at_least_single(scores(*batch.sensitivity(name, chosen)))
        below = score < score.quantile(self.prune, dim=1, keepdim=True)
        hidden = torch.zeros(batch.count, width, dtype=torch.bool, device=score.device).scatter(1, chosen, below)
        # NaN and infinity always pass: a zero in their place would hide a broken gradient from the server.
        masked = update[weight].masked_fill(hidden[:, None] & torch.isfinite(update[weight]), 0.0)
        return Tree({**update, weight: masked})

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Leave the zeroed columns of the layer out: everything else went out exactly.

        Without a given layer it is the last weight with two axes, as the last linear layer's is. Over several local
        steps columns are zeroed in some of them, so the whole weight is left out.
        """
        known = super().knowledge(observed, facts)
        weight = self._observed_weight(observed)
        if weight is None:
            return known
        trusted = (observed[weight] != 0).any(1, keepdim=True) if facts.steps == 1 else torch.zeros(1, dtype=torch.bool)
        column = trusted.to(observed[weight]).expand_as(observed[weight])
        return Knowledge(target=observed, weight=Tree({**known.weight, weight: column}))

    def measures(self, update: Tree) -> dict[str, float]:
        """How many columns are zeroed if no scores are equal, and their share of all entries."""
        weight = self._observed_weight(update)
        if weight is None:
            return {}
        rows, width = update[weight].shape[1:]
        columns = math.ceil(self.prune * (min(self.features or width, width) - 1) - 1e-9)
        return {
            "columns zeroed of that layer": float(columns),
            "share of all entries zeroed": columns * rows / update.size,
        }

    def _observed_weight(self, update: Tree) -> str | None:
        """The name of the layer's weight, as far as an update tells."""
        if self.layer is not None:
            return _weight_of(self.layer) if _weight_of(self.layer) in update else None
        return next((n for n in reversed(list(update)) if n.endswith("weight") and update[n].dim() == 3), None)

    @property
    def random(self) -> bool:
        """As good as that: which columns are zeroed does not follow from the gradient.

        To repeat it for a candidate takes a backward pass for each feature, and leaving the zeroed columns out tells as
        much: all else goes out exactly (see `knowledge`).
        """
        return self.prune > 0


def scores(features: Tensor, norms: Tensor) -> Tensor:
    """Σ ‖∂r_i/∂x‖/|r_i| over the batch, from tensors of shape (K, B, m): shape (K, m)."""
    size = features.abs()
    # torch has no quantiles in half precision.
    return torch.where(size > 0, norms / size, 0.0).sum(1, dtype=torch.promote_types(size.dtype, torch.float32))


def linear_layer(model: nn.Module, wanted: str | None, update: Tree) -> str:
    """The name of the wanted linear layer, or of the last one, among those that are trained."""
    found: list[str] = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and _weight_of(n) in update]
    if not found:
        raise FedveilError("soteria needs a model with a trained linear layer: this one has none")
    if wanted is None:
        return found[-1]
    if wanted not in found:
        raise FedveilError(f"soteria: the model has no trained linear layer '{wanted}'; it has {', '.join(found)}")
    return wanted


def _weight_of(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"
