"""Pictures that stay on disk and are read when a batch needs them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import FedveilError
from fedveil.tasks.formats.pictures import read_picture

SAMPLED = 1024  # channel statistics are taken from at most this many pictures


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """A list of picture files that reads like an array of shape (N, channels, size, size), uint8."""

    root: Path
    names: tuple[str, ...]  # below the root
    size: int
    channels: int

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape that an array of them would have."""
        return len(self.names), self.channels, self.size, self.size

    def read(self, index: int) -> NDArray[np.uint8]:
        """One picture."""
        return read_picture(self.root / self.names[index], self.size, self.channels)

    def sha256(self) -> str:
        """The hash of the files' names and sizes and of how they are read; hashing the contents would take hours."""
        total = hashlib.sha256(f"{self.size}|{self.channels}|".encode())
        for name in self.names:
            try:
                total.update(f"{name}|{(self.root / name).stat().st_size}|".encode())
            except OSError as error:
                raise FedveilError(f"cannot read {self.root / name}: {error.strerror}") from None
        return total.hexdigest()

    def joined(self, others: Sequence[ImageFiles]) -> ImageFiles:
        """These and others of the same root."""
        names = [name for files in (self, *others) for name in files.names]
        return ImageFiles(self.root, tuple(names), self.size, self.channels)


def channel_statistics(images: NDArray[Any] | ImageFiles) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every channel, of pixels in [0, 1], to four digits.

    Of picture files, at most 1,024 are read, evenly spaced.
    """
    count = len(images)
    if isinstance(images, ImageFiles):
        chosen = np.linspace(0, count - 1, min(count, SAMPLED)).astype(int)
        blocks = (images.read(int(index))[None] for index in chosen)
    else:
        blocks = (images[start : start + SAMPLED] for start in range(0, count, SAMPLED))
    channels = images.shape[1]
    total, squares, pixels = np.zeros(channels), np.zeros(channels), 0
    for block in blocks:
        values = block.transpose(1, 0, 2, 3).reshape(channels, -1).astype(np.float64) / 255
        total += values.sum(1)
        squares += (values**2).sum(1)
        pixels += values.shape[1]
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 0))
    # A constant channel cannot be scaled.
    return tuple(round(float(m), 4) for m in mean), tuple(round(float(s), 4) or 1.0 for s in std)
