"""The shape that MNIST and Fashion-MNIST share: gray 28×28 images in four IDX files."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from fedveil.tasks.datasets.base import DataSet, LoadedData, Part, find_files
from fedveil.tasks.formats.idx import read_idx
from fedveil.tasks.normalization import Normalization

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class IdxImages(DataSet):
    """Base of the sets that come as MNIST does. A subclass states its classes and channel statistics."""

    class_names: ClassVar[tuple[str, ...]]
    mean: ClassVar[float]
    std: ClassVar[float]

    def load(self, root: Path | None = None) -> LoadedData:
        """Read the four files from root/<name>/ or root/."""
        images, labels, test_images, test_labels = find_files(self.name, FILES, root)
        return LoadedData(
            name=self.name,
            train=_part(images, labels),
            test=_part(test_images, test_labels),
            normalization=Normalization((self.mean,), (self.std,)),
            class_names=self.class_names,
        )


def _part(images: Path, labels: Path) -> Part:
    pixels = read_idx(images, (None, 28, 28))
    return Part(pixels[:, None], read_idx(labels, (None,)).astype(np.int64))
