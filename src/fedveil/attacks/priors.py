"""Priors on the candidate inputs: what natural images look like. Pure functions of one victim's batch (B, ...)."""

from __future__ import annotations

from torch import Tensor


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbors, along the height plus along the width, for any number of channels."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs()
    across = (images[..., :, 1:] - images[..., :, :-1]).abs()
    # Not `mean`: an image of a single row or column has no neighbors that way.
    return down.sum() / max(down.numel(), 1) + across.sum() / max(across.numel(), 1)


def mean_square(inputs: Tensor) -> Tensor:
    """Mean square of the inputs: keeps them near the mean of normalized data."""
    return inputs.square().mean()
