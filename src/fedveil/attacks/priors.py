"""Priors on the candidate inputs: what natural data look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Prior(Protocol):
    """A cost of one victim's inputs (B, ...) that is added to the match: a pure function that `vmap` can stack."""

    def __call__(self, inputs: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TotalVariation:
    """`weight` times the total variation: favors smooth pictures."""

    weight: float

    def __call__(self, inputs: Tensor) -> Tensor:
        """The weighted prior; of inputs that are no pictures, nothing."""
        return self.weight * total_variation(inputs) if inputs.dim() >= 3 else inputs.new_zeros(())


@dataclass(frozen=True)
class MeanSquare:
    """`weight` times the mean square of the inputs: keeps them near the mean of normalized data."""

    weight: float

    def __call__(self, inputs: Tensor) -> Tensor:
        """The weighted prior."""
        return self.weight * inputs.square().mean()


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbors, along the height plus along the width, for any number of channels."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs()
    across = (images[..., :, 1:] - images[..., :, :-1]).abs()
    # Not `mean`: an image of a single row or column has no neighbors that way.
    return down.sum() / max(down.numel(), 1) + across.sum() / max(across.numel(), 1)
