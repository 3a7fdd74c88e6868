"""Pictures in folders, one folder per class, as ImageNet and Tiny-ImageNet have them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from fedveil.errors import FedveilError
from fedveil.fields import Count, declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.base import DataSet, LoadedData, Part
from fedveil.tasks.datasets.statistics import statistics
from fedveil.tasks.formats.pictures import SUFFIXES
from fedveil.tasks.image_files import ImageFiles
from fedveil.tasks.sources import data_root

ANNOTATIONS = "val_annotations.txt"
ANNOTATIONS_LIMIT = 2**26  # bytes
HELD_OUT = 5  # without a test part, one in this many pictures of each class


@datasets.register("image-folder")
@declared
class ImageFolder(DataSet):
    """Your own pictures: path=FOLDER with CLASS/picture, train/CLASS/picture, or the layout of (Tiny-)ImageNet.

    If there is a folder val and none named test, val is the test part. If there is neither, every fifth picture of each
    class is. Tiny-ImageNet's folder val can stand alone, too. Pictures are read when they are needed: the short side
    resized to `size`, the middle cut out. Channel statistics are those of at most 1,024 training pictures.
    """

    path: str  # folder of the pictures, from the working folder or from the data root
    size: Count = 64  # pixels of a side
    channels: Literal[1, 3] = 3  # gray or color

    def load(self, root: Path | None = None) -> LoadedData:
        """List the pictures."""
        top = self._folder(root)
        train, validation, test = _parts(top)
        classes = sorted({label for _, label in train})
        if len(classes) < 2:
            raise FedveilError(f"{top}: {len(classes)} class folder{'s' * (len(classes) != 1)} with pictures, need two")
        parts = [None if part is None else self._part(top, part, classes) for part in (train, validation, test)]
        assert parts[0] is not None
        assert parts[2] is not None
        return LoadedData(
            name="image-folder",
            train=parts[0],
            validation=parts[1],
            test=parts[2],
            normalization=statistics(parts[0], top),
            class_names=tuple(classes),
        )

    def _folder(self, root: Path | None) -> Path:
        given = Path(self.path).expanduser()
        for choice in (given, data_root(root) / given):
            if choice.is_dir():
                return choice
        raise FedveilError(f"image-folder: there is no folder {given}, neither here nor in {data_root(root)}")

    def _part(self, top: Path, pictures: list[tuple[str, str]], classes: list[str]) -> Part:
        number = {label: index for index, label in enumerate(classes)}
        for name, label in pictures:
            if label not in number:
                raise FedveilError(f"{top / name}: class {label} has no pictures in the training part")
        names = tuple(name for name, _ in pictures)
        labels = np.array([number[label] for _, label in pictures], dtype=np.int64)
        return Part(ImageFiles(top, names, self.size, self.channels), labels)


Pictures = list[tuple[str, str]]  # path below the top folder, class


def _parts(top: Path) -> tuple[Pictures, Pictures | None, Pictures]:
    """Training, validation and test part, as the folders have them."""
    if not (top / "train").is_dir():
        annotated = (top / ANNOTATIONS).is_file()  # Tiny-ImageNet's folder val alone
        train, test = _held_out(list(_annotated(top, "") if annotated else _classes(top, "")))
        return train, None, test
    train = list(_classes(top, "train"))
    if (top / "val" / ANNOTATIONS).is_file():  # the test part of Tiny-ImageNet has no labels
        return train, None, list(_annotated(top, "val/"))
    found = {part: list(_classes(top, part)) for part in ("val", "test") if (top / part).is_dir()}
    for part, pictures in (("train", train), *found.items()):
        if not pictures:
            raise FedveilError(f"{top / part}: no pictures in class folders ({', '.join(sorted(SUFFIXES))})")
    if "test" in found:
        return train, found.get("val"), found["test"]
    if "val" in found:
        return train, None, found["val"]
    train, test = _held_out(train)
    return train, None, test


def _classes(top: Path, part: str) -> Iterator[tuple[str, str]]:
    for label in _listed(top / part, folders=True):
        inside = f"{part}/{label}" if part else label
        # Tiny-ImageNet has one more folder, beside a file of boxes.
        deeper = f"{inside}/images" if (top / inside / "images").is_dir() else inside
        for name in _listed(top / deeper, folders=False):
            yield f"{deeper}/{name}", label


def _listed(folder: Path, *, folders: bool) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".")]
            if folders:
                return sorted(entry.name for entry in seen if entry.is_dir())
            return sorted(e.name for e in seen if os.path.splitext(e.name)[1].lower() in SUFFIXES and e.is_file())
    except OSError as error:
        raise FedveilError(f"cannot read {folder}: {error.strerror}") from None


def _annotated(top: Path, part: str) -> Iterator[tuple[str, str]]:
    """Tiny-ImageNet's validation part: lines of picture, class and a box, separated by tabs."""
    path, pictures = top / f"{part}{ANNOTATIONS}", top / f"{part}images"
    if path.stat().st_size > ANNOTATIONS_LIMIT:
        raise FedveilError(f"{path}: larger than {ANNOTATIONS_LIMIT:,} bytes")
    there = set(_listed(pictures, folders=False)) if pictures.is_dir() else set()
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        name, *rest = line.split("\t")
        if not rest or name not in there:
            raise FedveilError(f"{path}, line {number}: expected a picture of {pictures}, a tab, a class")
        yield f"{part}images/{name}", rest[0]


def _held_out(pictures: Pictures) -> tuple[Pictures, Pictures]:
    seen: Counter[str] = Counter()
    train: Pictures = []
    test: Pictures = []
    for name, label in pictures:
        seen[label] += 1
        (test if seen[label] % HELD_OUT == 0 else train).append((name, label))
    if pictures and not test:
        raise FedveilError(f"no class has {HELD_OUT} pictures, to hold one out for the test: make a folder test")
    return train, test
