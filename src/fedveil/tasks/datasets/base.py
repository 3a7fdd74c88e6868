"""The base of data sets: a name, classes, channel statistics, and a way to load arrays or list files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.errors import FedveilError
from fedveil.tasks.fingerprint import Fingerprint
from fedveil.tasks.image_files import ImageFiles
from fedveil.tasks.normalization import Normalization

if TYPE_CHECKING:
    from fedveil.tasks.datasets.table import LoadedTable
    from fedveil.tasks.datasets.text import LoadedText


@dataclass(frozen=True, eq=False)
class Part:
    """Images (N, C, H, W), uint8 or floating pixels in [0, 1], or picture files; and their labels.

    Labels are int64 class numbers (N,), or float32 zeros and ones (N, L) if an example can have several labels.
    """

    images: NDArray[Any] | ImageFiles
    labels: NDArray[Any]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def multi_label(self) -> bool:
        """Whether an example can have several labels, or none."""
        return self.labels.ndim == 2


def pooled(parts: Sequence[Part]) -> Part:
    """All examples of the parts, in order."""
    labels = np.concatenate([part.labels for part in parts])
    files = [part.images for part in parts if isinstance(part.images, ImageFiles)]
    if files:
        return Part(files[0].joined(files[1:]), labels)
    return Part(np.concatenate([part.images for part in parts]), labels)


@dataclass(frozen=True, eq=False)
class LoadedData:
    """The arrays of a data set in its own split, checked when made."""

    name: str
    train: Part
    test: Part
    normalization: Normalization
    class_names: tuple[str, ...]
    validation: Part | None = None
    note: str = ""  # how it differs from the published set, such as missing files

    def __post_init__(self) -> None:
        for label, part in self.parts.items():
            _check(f"{self.name} ({label})", part, self.classes, self.normalization.channels)

    @property
    def classes(self) -> int:
        """The number of classes (labels run from 0 to classes − 1), or of labels that an example may have."""
        return len(self.class_names)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts that exist, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image: channels, height, width."""
        return self.train.images.shape[1:]

    @cached_property
    def sha256(self) -> str:
        """The hash of all images and labels, independent of their files; for picture files see `ImageFiles`."""
        total = Fingerprint()
        for name, part in self.parts.items():
            if isinstance(part.images, ImageFiles):
                digest = bytes.fromhex(part.images.sha256())
                total.add(f"{name} files", torch.tensor(list(digest), dtype=torch.uint8))
            else:
                total.add(f"{name} images", torch.from_numpy(part.images))
            total.add(f"{name} labels", torch.from_numpy(part.labels))
        return total.hexdigest()


class DataSet(ABC):
    """A data set that can be chosen by name. A new one is a module in this folder::

    @datasets.register("my-images")
    @declared
    class MyImages(DataSet):
        \"\"\"One line for `fedveil list datasets`.\"\"\"

        def load(self, root: Path | None = None) -> LoadedData: ...
    """

    name: ClassVar[str]

    @abstractmethod
    def load(self, root: Path | None = None) -> LoadedData | LoadedText | LoadedTable:
        """Read arrays, texts or a table from the files under `root` (see `fedveil.tasks.sources.data_root`)."""


def _check(where: str, part: Part, classes: int, channels: int) -> None:
    images, labels = part.images, part.labels
    if images.ndim != 4 or images.shape[1] != channels:
        raise FedveilError(f"{where}: images have shape {images.shape}, expected (N, {channels}, height, width)")
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise FedveilError(f"{where}: images are {images.dtype}, expected uint8, or floating pixels in [0, 1]")
    if part.multi_label and (labels.dtype != np.float32 or labels.shape[1] != classes):
        raise FedveilError(f"{where}: labels are {labels.dtype} {labels.shape}, expected float32 (N, {classes})")
    if not part.multi_label and (labels.ndim != 1 or labels.dtype != np.int64):
        raise FedveilError(f"{where}: labels are {labels.dtype} {labels.shape}, expected int64 (N,)")
    if len(images) != len(labels):
        raise FedveilError(f"{where}: {len(images)} images but {len(labels)} labels; the files do not belong together")
    if not len(labels):
        raise FedveilError(f"{where}: no examples")
    if part.multi_label:
        if not np.isin(labels, (0, 1)).all():
            raise FedveilError(f"{where}: labels must be 0 or 1 where an example has several")
    elif labels.min() < 0 or labels.max() >= classes:
        wrong = int(labels.min() if labels.min() < 0 else labels.max())
        raise FedveilError(f"{where}: label {wrong} is out of range: there are {classes} classes, 0 to {classes - 1}")
    # NaN fails both comparisons, so this finds it too.
    if (
        not isinstance(images, ImageFiles)
        and images.dtype != np.uint8
        and not (images.min() >= 0 and images.max() <= 1)
    ):
        found = "NaN" if np.isnan(images).any() else f"values from {images.min():g} to {images.max():g}"
        raise FedveilError(f"{where}: images contain {found}; pixels must be in [0, 1]")
