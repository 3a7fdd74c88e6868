"""What several searches for one batch agree on: their pictures in one order, registered, and averaged.

Pictures within a batch have no order of their own: one search may hold at its first place what another holds at its
third. Labels tell some apart; those of equal labels are assigned to each other. And where a model hardly minds a
picture moved by a pixel or two, searches come to moved pictures, whose plain mean would be blurred.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.fft import irfft2, rfft2

# A picture is moved only if that leaves no more than this share of its squared difference: in noise some shift always
# fits a little better than none.
HELPS = 0.8
REACH = 8  # a picture is moved by no more than its width over this
ROUNDS = 2  # the first orders and registers by the leading search, the second by the mean of all


class Consensus(NamedTuple):
    """What the S searches of each of V victims agree on."""

    mean: Tensor  # (V, B, ...) in the order of the leading search
    order: Tensor  # (V, S, B): the place of a search at which it holds each picture of the mean

    def in_order(self, values: Tensor) -> Tensor:
        """Values (V, S, B, ...) of all searches in the order of the mean."""
        return reordered(values, self.order)

    def for_each(self) -> Tensor:
        """The mean (V, S, B, ...) in every search's own order."""
        places = self.order.argsort(-1)
        return reordered(self.mean.unsqueeze(1).expand(*places.shape, *self.mean.shape[2:]), places)


def consensus(pictures: Tensor, leader: Tensor, labels: Tensor | None, counted: Tensor) -> Consensus:
    """The mean of what S searches hold, pictures (V, S, B, ...).

    leader: (V,), the search whose pictures and order the others are first held beside. labels: (V, B), the same in all
    searches; None: any picture may be any other. counted: (V, S), whether a search takes part in the mean.
    """
    victims = torch.arange(len(pictures), device=pictures.device)
    toward = pictures[victims, leader]
    # A victim none of whose searches counts still gets a mean.
    counted = (counted | ~counted.any(1, keepdim=True)).to(pictures)
    share = counted / counted.sum(1, keepdim=True)
    share = share.reshape(*share.shape, *[1] * (pictures.dim() - 2))
    order = same_order(pictures, toward, labels)
    for number in range(ROUNDS):
        order = order if number == 0 else same_order(pictures, toward, labels)
        ordered = reordered(pictures, order)
        plain = (share * ordered).sum(1)
        toward = (share * registered(ordered, plain.unsqueeze(1).expand_as(ordered))).sum(1)
    return Consensus(toward, order)


def same_order(pictures: Tensor, toward: Tensor, labels: Tensor | None) -> Tensor:
    """Which picture (V, S, B) of each search goes with which of (V, B, ...): the least squared difference in all.

    Only pictures of equal labels are exchanged. Solved exactly, by the Hungarian method.
    """
    count, searches, batch = pictures.shape[:3]
    found = np.tile(np.arange(batch), (count, searches, 1))
    for victim in range(count):
        alike = torch.ones(batch, batch, dtype=torch.bool)
        if labels is not None:
            own = labels[victim].cpu().reshape(batch, -1)
            alike = (own[:, None] == own[None, :]).all(2)
        if batch == 1 or int(alike.sum()) == batch:  # labels tell all of them apart
            continue
        theirs, ours = toward[victim].flatten(1).double(), pictures[victim].flatten(2).double()
        costs = torch.cdist(theirs.expand(searches, -1, -1), ours, compute_mode="donot_use_mm_for_euclid_dist")
        costs = torch.nan_to_num(costs.square().cpu(), nan=0.0, posinf=0.0, neginf=0.0)
        costs = costs.masked_fill(~alike, 1 + 2 * batch * float(costs.max()))  # dearer than any order within labels
        for search in range(searches):
            found[victim, search] = linear_sum_assignment(costs[search].numpy())[1]
    return torch.from_numpy(found).to(pictures.device)


def reordered(values: Tensor, order: Tensor) -> Tensor:
    """Values (V, S, B, ...) in an order (V, S, B)."""
    count, searches, _ = order.shape
    victims = torch.arange(count, device=order.device)[:, None, None]
    places = torch.arange(searches, device=order.device)[None, :, None]
    return values[victims, places, order]


def registered(pictures: Tensor, toward: Tensor) -> Tensor:
    """Each picture (..., C, H, W) moved by the few whole pixels that bring it nearest to the one of `toward`.

    Our reading of the paper's registration (RANSAC-flow, a network of its own): the peak of the cross-correlation
    proposes a shift, and the squared difference decides whether it is taken. Borders are repeated. What is no picture
    stays as it is.
    """
    if pictures.dim() < 3 or min(pictures.shape[-2:]) < REACH:
        return pictures
    flat, aim = (each.reshape(-1, *each.shape[-3:]) for each in (pictures, toward))
    moved = shifted(flat, proposed_shift(flat, aim))
    before, after = ((each - aim).square().flatten(1).sum(1) for each in (flat, moved))
    better = (after < HELPS * before).reshape(-1, 1, 1, 1)
    return torch.where(better, moved, flat).reshape(pictures.shape)


def proposed_shift(pictures: Tensor, toward: Tensor) -> Tensor:
    """How far down and to the right (N, 2) each picture (N, C, H, W) would have to go: the peak of the correlation."""
    height, width = pictures.shape[-2:]
    one, other = (each - each.mean((-2, -1), keepdim=True) for each in (pictures.float(), toward.float()))
    spectrum = (rfft2(one).conj() * rfft2(other)).sum(1)
    correlation = irfft2(spectrum, s=(height, width))
    reach = min(height, width) // REACH
    steps = torch.arange(-reach, reach + 1, device=pictures.device)
    near = correlation[:, steps[:, None] % height, steps[None, :] % width].flatten(1)
    peak = torch.nan_to_num(near, nan=-torch.inf).argmax(1)
    return torch.stack([steps[peak // len(steps)], steps[peak % len(steps)]], 1)


def shifted(pictures: Tensor, by: Tensor) -> Tensor:
    """Pictures (N, C, H, W) moved down and to the right by whole pixels (N, 2); what comes in repeats the border."""
    height, width = pictures.shape[-2:]
    rows = (torch.arange(height, device=by.device) - by[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width, device=by.device) - by[:, 1:]).clamp(0, width - 1)
    moved = pictures.gather(2, rows[:, None, :, None].expand_as(pictures))
    return moved.gather(3, columns[:, None, None, :].expand_as(pictures))
