"""Matching costs: how far the update of a candidate is from the observed one.

Pure functions of one victim's plain dicts. Every entry has a weight: 1 for an attacker who trusts all entries alike,
the attacker's trust in it for one who knows the defense, 0 for an entry left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

Update = Mapping[str, Tensor]
CostName = Literal["l2", "cosine", "layer-cosine", "l1-l2"]
# Keeps a zero update from dividing by zero: the square of a norm far below any real one. Not smaller, or the slope
# of the inverse root at zero would leave float32.
_TINY = 1e-24


def l2(update: Update, target: Update, weight: Update) -> Tensor:
    """Weighted sum of squared differences (DLG)."""
    return _total((weight[n] * (update[n] - target[n]).square()).sum() for n in target)


def cosine(update: Update, target: Update, weight: Update) -> Tensor:
    """One minus the weighted cosine over all entries taken together (Inverting Gradients): blind to scale."""
    dot = _total((weight[n] * update[n] * target[n]).sum() for n in target)
    ours = _total((weight[n] * update[n].square()).sum() for n in target)
    theirs = _total((weight[n] * target[n].square()).sum() for n in target)
    # One root each: their product would leave float32 for the small gradients of a trained model.
    return 1 - dot * torch.rsqrt(ours + _TINY) * torch.rsqrt(theirs + _TINY)


def layer_cosine(update: Update, target: Update, weight: Update) -> Tensor:
    """One minus the weighted cosine of each tensor, mean over the tensors that are not left out (LAMP)."""
    each = torch.stack([cosine({"": update[n]}, {"": target[n]}, {"": weight[n]}) for n in target])
    counted = torch.stack([(weight[n] > 0).any() for n in target]).to(each.dtype)
    return (each * counted).sum() / counted.sum().clamp_min(1)


def l1_l2(update: Update, target: Update, weight: Update, share: float = 0.01) -> Tensor:
    """Squared differences plus a share of absolute ones (TAG)."""
    absolute = _total((weight[n] * (update[n] - target[n]).abs()).sum() for n in target)
    return l2(update, target, weight) + share * absolute


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum()


COSTS: dict[CostName, Callable[[Update, Update, Update], Tensor]] = {
    "l2": l2,
    "cosine": cosine,
    "layer-cosine": layer_cosine,
    "l1-l2": l1_l2,
}
