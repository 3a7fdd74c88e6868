"""The map between pixels in [0, 1] and what the model sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.tasks.inputs import Inputs

ROUNDING = 1e-6
LOOSE = 0.01  # how far pixels that were normalized elsewhere, perhaps in half precision, may lie outside [0, 1]


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
        """The inverse of `normalize`. Nothing is clamped: values outside the box give pixels outside [0, 1]."""
        mean, std = self._statistics(inputs)
        return inputs * std + mean

    def box(self) -> tuple[Tensor, Tensor]:
        """The normalized values of pixel 0 and pixel 1: two tensors of shape (C, 1, 1)."""
        black = torch.zeros(self.channels, 1, 1)
        return self.normalize(black), self.normalize(black + 1)

    def check_shape(self, like: Tensor) -> None:
        """Refuse a wrong number of channels, because the statistics of one channel would broadcast over three."""
        if like.dim() < 3 or like.shape[-3] != self.channels:
            last = like.dim() > 2 and like.shape[-1] == self.channels
            raise FedveilError(
                f"images of shape {tuple(like.shape)} do not fit a normalization of {self.channels} "
                f"channel{'s' * (self.channels > 1)}: expected (..., {self.channels}, height, width)"
                + (", so write images.permute(0, 3, 1, 2)" if last and like.dim() == 4 else "")
            )

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        self.check_shape(like)
        mean = torch.tensor(self.mean, dtype=like.dtype, device=like.device)
        std = torch.tensor(self.std, dtype=like.dtype, device=like.device)
        return mean.reshape(-1, 1, 1), std.reshape(-1, 1, 1)


class PixelRange:
    """Checks whether images are what the user says: pixels still to be normalized, or already normalized.

    Normalizing twice would go unnoticed, so pixels and normalized values must not be mistaken for each other.
    """

    def __init__(self, normalization: Normalization | None, *, normalized: bool) -> None:
        if normalized and normalization is None:
            raise FedveilError("normalized=True needs the normalization: add normalization=Normalization(mean, std)")
        self._normalization = normalization
        self._normalized = normalized
        self._values = (math.inf, -math.inf)
        self._pixels = (math.inf, -math.inf)  # the pixels behind the values, if those are normalized

    def add(self, images: Inputs) -> None:
        """Add a batch of images; refuse what cannot be normalized at all."""
        if self._normalization is None:
            return
        if not isinstance(images, Tensor):
            raise FedveilError("a normalization needs inputs that are one tensor of images, not named parts")
        if images.dtype == torch.uint8:
            if self._normalized:
                raise FedveilError("uint8 images are pixels, which are not normalized yet: leave normalized=True out")
            self._normalization.check_shape(images)
            return
        if not images.is_floating_point():
            raise FedveilError(f"images to be normalized must be uint8, or floating in [0, 1], not {images.dtype}")
        for start in range(0, len(images), 1024):  # in parts, because a large set may fit into memory only once
            some = images[start : start + 1024].float()
            self._values = _wider(self._values, some)
            self._pixels = _wider(self._pixels, self._normalization.pixels(some))

    def check(self) -> None:
        """Refuse values that are not what the user says."""
        low, high = self._values
        if low > high:
            return
        dark, bright = self._pixels
        are_pixels = low >= -ROUNDING and high <= 1 + ROUNDING
        could_be_normalized = dark >= -LOOSE and bright <= 1 + LOOSE
        found = f"the images range from {low:.4g} to {high:.4g}"
        if self._normalized and not could_be_normalized:
            raise FedveilError(
                f"{found}, which stand for pixels from {dark:.4g} to {bright:.4g}, not between 0 and 1: give the mean "
                "and std that they were normalized with"
            )
        if self._normalized and are_pixels and not _unlike_pixels(self._normalization):
            raise FedveilError(f"{found}, as pixels do that are not normalized yet: leave normalized=True out")
        if not self._normalized and not are_pixels:
            right = (
                "if this normalization was applied already, add normalized=True"
                if could_be_normalized
                else "divide by 255, or, if they are normalized already, give their mean and std and normalized=True"
            )
            raise FedveilError(f"{found}, and floating images to be normalized must be pixels in [0, 1]: {right}")


def _wider(known: tuple[float, float], values: Tensor) -> tuple[float, float]:
    low, high = values.aminmax()
    return min(known[0], float(low)), max(known[1], float(high))


def _unlike_pixels(normalization: Normalization | None) -> bool:
    """Whether images normalized by this can lie between 0 and 1: only if nothing is subtracted."""
    return normalization is None or min(normalization.mean) <= 0
