"""How far the update of a candidate is from the observed one: what a matching attack makes small.

Pure functions of one victim's plain dicts. Every entry has a weight: 1 for an attacker who trusts all entries alike,
the attacker's trust in it for one who knows the defense, 0 for an entry left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Update = Mapping[str, Tensor]
MatchName = Literal[
    "l2", "relative-l2", "unit-l2", "direction", "cosine", "layer-cosine", "signs", "l1-l2", "l1-l2-by-layer"
]
# Keeps a zero update from dividing by zero: the square of a norm far below any real one. Not smaller, or the slope
# of the inverse root at zero would leave float32.
_TINY = 1e-24
ROUNDING = 1e-5  # of the largest tensor's norm: one below is no more than rounding
# How surely a sign is told apart, per mean size of its tensor's entries. On digits under sign compression 4 gives
# 16 dB, 16 gives 21, 64 gives 24, and the cosine 9.
SHARPNESS = 64.0
_SQUARES = "sum of squares"  # no parameter has spaces in its name


def l2(update: Update, target: Update, weight: Update) -> Tensor:
    """Weighted sum of squared differences (DLG)."""
    return _total((weight[n] * (update[n] - target[n]).square()).sum() for n in target)


def relative_aim(target: Update, weight: Update) -> Update:
    """The target, and the weighted sum of its squares: what distances are measured by."""
    total = _total((weight[n] * target[n].square()).sum() for n in target)
    return {**target, _SQUARES: total}


def relative_l2(update: Update, aim: Update, weight: Update) -> Tensor:
    """The weighted sum of squared differences over that of the target's squares: 0 is a match, 1 is no better than 0.

    Beside the cosine, which is blind to it, this knows the size of an update; and it stands in the same proportion to
    priors whatever that size is.
    """
    target = {n: tensor for n, tensor in aim.items() if n != _SQUARES}
    return l2(update, target, weight) / (aim[_SQUARES] + _TINY)


def unit_l2(update: Update, target: Update, weight: Update) -> Tensor:
    """Weighted sum of squared differences to the update brought to length 1: for clipped ones, in units of the clip."""
    ours = torch.rsqrt(_total(update[n].square().sum() for n in target) + _TINY)
    return l2({n: update[n] * ours for n in target}, target, weight)


def unit_aim(target: Update, weight: Update) -> Update:
    """The target over its weighted norm."""
    theirs = _total((weight[n] * target[n].square()).sum() for n in target)
    return {n: target[n] * torch.rsqrt(theirs + _TINY) for n in target}


def direction_l2(update: Update, aim: Update, weight: Update) -> Tensor:
    """The weighted squared distance of two directions, 2 − 2·cosine: near a match the share that is left unexplained.

    Blind to scale as the cosine is, but a sum of small squares where that is one minus a number near one: the cosine
    loses its digits at 1e-7, this goes on.
    """
    ours = torch.rsqrt(_total((weight[n] * update[n].square()).sum() for n in aim) + _TINY)
    return l2({n: update[n] * ours for n in aim}, aim, weight)


def direction(target: Update, weight: Update) -> Update:
    """The weighted target over its norm: all of it that the cosine needs, and that stays the same over an attack."""
    theirs = _total((weight[n] * target[n].square()).sum() for n in target)
    # One root each for target and update: their product would leave float32 for a trained model's small gradients.
    return {n: weight[n] * target[n] * torch.rsqrt(theirs + _TINY) for n in target}


def cosine_to(update: Update, aim: Update, weight: Update) -> Tensor:
    """One minus the weighted cosine over all entries taken together (Inverting Gradients): blind to scale."""
    dot = _total((update[n] * aim[n]).sum() for n in aim)
    ours = _total((weight[n] * update[n].square()).sum() for n in aim)
    return 1 - dot * torch.rsqrt(ours + _TINY)


def layer_directions(target: Update, weight: Update) -> Update:
    """The `direction` of every tensor by itself; 0 of one that is nothing but rounding, whose direction says nothing.

    Such are the biases of an attention's keys, and those before a batch norm: they do not change what the model says.
    """
    norms = torch.stack([(weight[n] * target[n].square()).sum().sqrt() for n in target])
    counted = (norms > ROUNDING * norms.amax()).to(norms.dtype)
    return {n: direction({n: target[n]}, weight)[n] * there for n, there in zip(target, counted, strict=True)}


def layer_cosine_to(update: Update, aim: Update, weight: Update) -> Tensor:
    """One minus the weighted cosine of each tensor, mean over the tensors that are not left out (LAMP)."""
    each = torch.stack([cosine_to(update, {n: aim[n]}, weight) for n in aim])
    counted = torch.stack([((weight[n] > 0) & (aim[n] != 0)).any() for n in aim]).to(each.dtype)
    return (each * counted).sum() / counted.sum().clamp_min(1)


def l1_l2(update: Update, target: Update, weight: Update, share: float = 0.01) -> Tensor:
    """Squared differences plus a share of absolute ones (TAG)."""
    absolute = _total((weight[n] * (update[n] - target[n]).abs()).sum() for n in target)
    return l2(update, target, weight) + share * absolute


def l1_l2_by_layer(update: Update, target: Update, weight: Update, share: float = 0.01) -> Tensor:
    """The same with a share that falls in a line from the first tensor to the last (TAG on transformers)."""
    falling = {name: share * (1 - place / len(target)) for place, name in enumerate(target)}
    absolute = _total(falling[n] * (weight[n] * (update[n] - target[n]).abs()).sum() for n in target)
    return l2(update, target, weight) + absolute


def signs(update: Update, target: Update, weight: Update) -> Tensor:
    """The mean over entries of −log P(the sign that was sent | the update's entry): for updates that are signs alone.

    A sign is the update's with the chance σ(SHARPNESS · |entry| over the mean size in its tensor); a weight w below 1
    says that it was turned with the chance (1 − w)/2. An entry that was sent as zero is wrong with either sign.
    Tensors that are nothing but rounding count for nothing. Blind to the size of every tensor.
    """
    trusted = {n: (weight[n] > 0) & torch.ones_like(target[n], dtype=torch.bool) for n in target}
    sizes = torch.stack([update[n].abs().mean() * trusted[n].any() for n in target])
    counted = sizes > ROUNDING * sizes.amax()
    units = torch.where(counted, sizes, 1.0)
    costs, counts = [], []
    for n, unit, there in zip(target, units, counted, strict=True):
        entries, sent = SHARPNESS * update[n] / unit, torch.sign(target[n])
        right = F.logsigmoid(torch.where(sent == 0, -entries.abs(), sent * entries))
        cost = -torch.logaddexp(torch.log((1 - weight[n]) / 2), torch.log(weight[n]) + right)
        costs.append(there * torch.where(trusted[n], cost, 0.0).sum())
        counts.append(there * trusted[n].sum())
    return _total(costs) / _total(counts).clamp_min(1.0)


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum()


class Match(NamedTuple):
    """A matching cost in two parts: what is made of target and weight once, and the cost of an update against that."""

    aim: Callable[[Update, Update], Update]  # of (target, weight)
    of: Callable[[Update, Update, Update], Tensor]  # of (update, aim, weight)

    def __call__(self, update: Update, target: Update, weight: Update) -> Tensor:
        """Both parts in one."""
        return self.of(update, self.aim(target, weight), weight)


def _as_it_is(target: Update, weight: Update) -> Update:
    return target


cosine = Match(direction, cosine_to)
layer_cosine = Match(layer_directions, layer_cosine_to)
MATCHES: dict[MatchName, Match] = {
    "l2": Match(_as_it_is, l2),
    "relative-l2": Match(relative_aim, relative_l2),
    "unit-l2": Match(_as_it_is, unit_l2),
    "direction": Match(unit_aim, direction_l2),
    "cosine": cosine,
    "layer-cosine": layer_cosine,
    "signs": Match(_as_it_is, signs),
    "l1-l2": Match(_as_it_is, l1_l2),
    "l1-l2-by-layer": Match(_as_it_is, l1_l2_by_layer),
}
