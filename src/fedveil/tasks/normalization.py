"""The map between pixels in [0, 1] and what the model sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.errors import FedveilError


@dataclass(frozen=True)
class Normalization:
    """(pixel − mean) / std, with one mean and one standard deviation per channel.

    >>> gray = Normalization((0.5,), (0.25,))
    >>> gray.normalize(torch.tensor([[[0.0, 1.0]]]))
    tensor([[[-2.,  2.]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise FedveilError(
                f"normalization needs one mean and one std per channel, got {len(self.mean)} and {len(self.std)}"
            )
        if not all(math.isfinite(mean) for mean in self.mean):
            raise FedveilError(f"the means of a normalization must be finite, got {self.mean}")
        if not all(math.isfinite(std) and std > 0 for std in self.std):
            raise FedveilError(f"the stds of a normalization must be positive and finite, got {self.std}")

    @property
    def channels(self) -> int:
        """The number of channels."""
        return len(self.mean)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1], of shape (..., C, H, W), as the model sees them."""
        mean, std = self._statistics(pixels)
        return (pixels - mean) / std

    def pixels(self, inputs: Tensor) -> Tensor:
        """The inverse of `normalize`. Values outside the box come out outside [0, 1]: nothing is clamped."""
        mean, std = self._statistics(inputs)
        return inputs * std + mean

    def box(self) -> tuple[Tensor, Tensor]:
        """The normalized values of pixel 0 and pixel 1: two tensors of shape (C, 1, 1)."""
        black = torch.zeros(self.channels, 1, 1)
        return self.normalize(black), self.normalize(black + 1)

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if like.dim() < 3 or like.shape[-3] != self.channels:
            # One channel's statistics would silently broadcast over three.
            raise FedveilError(
                f"images of shape {tuple(like.shape)} do not fit a normalization of {self.channels} "
                f"channel{'s' * (self.channels > 1)}: expected (..., {self.channels}, height, width)"
            )
        mean = torch.tensor(self.mean, dtype=like.dtype, device=like.device)
        std = torch.tensor(self.std, dtype=like.dtype, device=like.device)
        return mean.reshape(-1, 1, 1), std.reshape(-1, 1, 1)
