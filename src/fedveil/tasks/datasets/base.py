"""What every data set is: a name, classes, channel statistics, and a way to load its arrays."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.errors import FedveilError
from fedveil.tasks.fingerprint import Fingerprint
from fedveil.tasks.normalization import Normalization


@dataclass(frozen=True, eq=False)
class Part:
    """Images (N, C, H, W), uint8 or floating pixels in [0, 1], and their labels (N,), int64."""

    images: NDArray[Any]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class LoadedData:
    """The arrays of a data set in its own split, checked when made."""

    name: str
    train: Part
    test: Part
    normalization: Normalization
    class_names: tuple[str, ...]
    validation: Part | None = None

    def __post_init__(self) -> None:
        for label, part in self.parts.items():
            _check(f"{self.name} ({label})", part, self.classes, self.normalization.channels)

    @property
    def classes(self) -> int:
        """The number of classes; labels run from 0 to classes − 1."""
        return len(self.class_names)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts there are, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image: channels, height, width."""
        return self.train.images.shape[1:]

    @cached_property
    def sha256(self) -> str:
        """The hash of all images and labels, whatever files they came from."""
        total = Fingerprint()
        for name, part in self.parts.items():
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
    def load(self, root: Path | None = None) -> LoadedData:
        """Read the arrays from the files under `root` (see `data_root`)."""


def data_root(root: Path | None = None) -> Path:
    """The folder of data files: the one given, or else FEDVEIL_DATA, or else ~/.cache/fedveil."""
    given = root or os.environ.get("FEDVEIL_DATA") or Path("~/.cache/fedveil")
    return Path(given).expanduser()


def find_files(name: str, stems: tuple[str, ...], root: Path | None = None) -> list[Path]:
    """The files of a data set, each plain or with `.gz`, in root/<name>/ or in root/ itself.

    All must stand in one folder: files of two sets can have the same names.
    """
    top = data_root(root)
    missing: dict[Path, list[str]] = {}
    for folder in (top / name, top):
        found = {stem: _plain_or_gz(folder / stem) for stem in stems}
        if all(found.values()):
            return [path for path in found.values() if path]
        missing[folder] = [f"{stem}.gz" for stem, path in found.items() if path is None]
    # Name the folder where only some are missing, if there is one, else the data set's own.
    folder = min(missing, key=lambda place: len(missing[place]))
    raise FedveilError(
        f"{name}: no {', '.join(missing[folder])} (or without .gz) in {folder}: put them there, or set FEDVEIL_DATA "
        f"or --data-root to the folder that holds them or holds {name}/"
    )


def _plain_or_gz(path: Path) -> Path | None:
    choices = (path.with_name(f"{path.name}.gz"), path)
    return next((choice for choice in choices if choice.is_file()), None)


def _check(where: str, part: Part, classes: int, channels: int) -> None:
    images, labels = part.images, part.labels
    if images.ndim != 4 or images.shape[1] != channels:
        raise FedveilError(f"{where}: images have shape {images.shape}, expected (N, {channels}, height, width)")
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise FedveilError(f"{where}: images are {images.dtype}, expected uint8, or floating pixels in [0, 1]")
    if labels.ndim != 1 or labels.dtype != np.int64:
        raise FedveilError(f"{where}: labels are {labels.dtype} {labels.shape}, expected int64 (N,)")
    if len(images) != len(labels):
        raise FedveilError(f"{where}: {len(images)} images but {len(labels)} labels; the files do not belong together")
    if not len(labels):
        raise FedveilError(f"{where}: no examples")
    if labels.min() < 0 or labels.max() >= classes:
        wrong = int(labels.min() if labels.min() < 0 else labels.max())
        raise FedveilError(f"{where}: label {wrong} is out of range: there are {classes} classes, 0 to {classes - 1}")
    # NaN fails both comparisons, so this finds it too.
    if images.dtype != np.uint8 and not (images.min() >= 0 and images.max() <= 1):
        found = "NaN" if np.isnan(images).any() else f"values from {images.min():g} to {images.max():g}"
        raise FedveilError(f"{where}: images contain {found}; pixels must be in [0, 1]")
