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
_TINY = 1e-20  # keeps a zero update from dividing by zero, far below any real norm


def l2(update: Update, target: Update, weight: Update) -> Tensor:
    """Weighted sum of squared differences (DLG)."""
    return _total((weight[n] * (update[n] - target[n]).square()).sum() for n in target)


def cosine(update: Update, target: Update, weight: Update) -> Tensor:
    """One minus the weighted cosine over all entries taken together (Inverting Gradients): blind to scale."""
    dot = _total((weight[n] * update[n] * target[n]).sum() for n in target)
    ours = _total((weight[n] * update[n].square()).sum() for n in target)
    theirs = _total((weight[n] * target[n].square()).sum() for n in target)
    return 1 - dot * torch.rsqrt(ours * theirs + _TINY)


def layer_cosine(update: Update, target: Update, weight: Update) -> Tensor:
    """One minus the weighted cosine of each tensor, mean over the tensors (LAMP)."""
    each = [cosine({"": update[n]}, {"": target[n]}, {"": weight[n]}) for n in target]
    return torch.stack(each).mean()


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
