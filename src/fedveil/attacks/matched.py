"""Squared error between two batches whose order is not known: each picture counts against its partner."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

_NEVER = 1e6  # of the largest error: what it costs to match pictures of unlike labels


def matched_error(predicted: Tensor, wanted: Tensor, labels: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The mean squared error of K batches (K, B, n) under the best assignment of each: shape (K,).

    labels: (K, B) of both, where they are known; then only pictures of one label are matched, as far as there are any.
    """
    size, pixels = wanted.shape[1:]
    if size == 1:
        return (predicted - wanted).square().mean((1, 2))
    order = assigned(predicted.detach(), wanted, labels)
    partners = wanted.gather(1, order[..., None].expand(-1, -1, pixels))
    return (predicted - partners).square().mean((1, 2))


def assigned(predicted: Tensor, wanted: Tensor, labels: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Which of the wanted pictures belongs to each of the predicted ones, by the Hungarian method: (K, B)."""
    errors = torch.cdist(predicted.double(), wanted.double()).square()
    if labels is not None:
        apart = labels[0][:, :, None] != labels[1][:, None, :]
        errors = errors + apart * _NEVER * (1 + errors.amax((1, 2), keepdim=True))
    errors = torch.nan_to_num(errors, nan=1e300, posinf=1e300)  # a network that diverged is matched anyhow
    found = [linear_sum_assignment(each)[1] for each in errors.cpu().numpy()]
    return torch.stack([torch.from_numpy(each) for each in found]).to(wanted.device)
