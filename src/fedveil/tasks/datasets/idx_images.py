"""What MNIST and Fashion-MNIST share: gray 28×28 images in four IDX files."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from fedveil.tasks.datasets.base import DataSet, LoadedData, Part
from fedveil.tasks.formats.idx import read_idx
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.sources import IDX_FILES, find_files


class IdxImages(DataSet):
    """Base of the sets that come as MNIST does. A subclass states its classes and channel statistics."""

    class_names: ClassVar[tuple[str, ...]]
    mean: ClassVar[float]
    std: ClassVar[float]

    def load(self, root: Path | None = None) -> LoadedData:
        """Read the four files from root/<name>/ or root/."""
        found = find_files(self.name, root)
        images, labels, test_images, test_labels = (found[stem] for stem in IDX_FILES)
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
