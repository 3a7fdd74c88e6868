"""Priors on the candidate inputs: what natural data look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Box = tuple[Tensor, Tensor]  # the lowest and the highest valid input, broadcast to the shape of one


class Prior(Protocol):
    """A cost of one victim's inputs (B, ...) that is added to the match: a pure function that `vmap` can stack.

    box: the valid range, where it is known.
    """

    def __call__(self, inputs: Tensor, box: Box | None) -> Tensor: ...


@dataclass(frozen=True)
class TotalVariation:
    """`weight` times the total variation: favors smooth pictures."""

    weight: float

    def __call__(self, inputs: Tensor, box: Box | None = None) -> Tensor:
        """The weighted prior; of inputs that are no pictures, nothing."""
        return self.weight * total_variation(inputs) if inputs.dim() >= 3 else inputs.new_zeros(())


@dataclass(frozen=True)
class MeanSquare:
    """`weight` times the mean square of the inputs: keeps them near the mean of normalized data."""

    weight: float

    def __call__(self, inputs: Tensor, box: Box | None = None) -> Tensor:
        """The weighted prior."""
        return self.weight * inputs.square().mean()


@dataclass(frozen=True)
class Outside:
    """`weight` times the mean square by which inputs leave the valid range: for optimizers that cannot be clamped.

    Most pixels of many pictures lie at an end of their range, so the range tells much: with it, L-BFGS rebuilds batches
    of 8 digits from an untrained LeNet to 39 dB, and to 16 dB without.
    """

    weight: float

    def __call__(self, inputs: Tensor, box: Box | None) -> Tensor:
        """The weighted prior; nothing where the range is not known."""
        if box is None:
            return inputs.new_zeros(())
        low, high = box
        return self.weight * ((low - inputs).relu().square() + (inputs - high).relu().square()).mean()


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbors, along the height plus along the width, for any number of channels."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs()
    across = (images[..., :, 1:] - images[..., :, :-1]).abs()
    # Not `mean`: an image of a single row or column has no neighbors that way.
    return down.sum() / max(down.numel(), 1) + across.sum() / max(across.numel(), 1)
