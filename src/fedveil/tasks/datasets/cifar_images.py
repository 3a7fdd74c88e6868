"""What CIFAR-10 and CIFAR-100 share: color 32×32 images in pickled batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedveil.errors import FedveilError
from fedveil.tasks.datasets.base import Part
from fedveil.tasks.formats.cifar_pickle import read_cifar_pickle


def read_batches(paths: Sequence[Path], key: str) -> Part:
    """The images of some batches, with the labels under `key`."""
    parts = [_batch(path, key) for path in paths]
    return Part(np.concatenate([part.images for part in parts]), np.concatenate([part.labels for part in parts]))


def _batch(path: Path, key: str) -> Part:
    held = read_cifar_pickle(path)
    images, labels = held.get("data"), held.get(key)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != 3072:
        shown = images.shape if isinstance(images, np.ndarray) else type(images).__name__
        raise FedveilError(f"{path}: its images are {shown}, expected N × 3072 (three colors, 32 × 32)")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 2**31 for label in labels):
        raise FedveilError(f"{path}: has no list of class numbers under '{key}'")
    if len(labels) != len(images):
        raise FedveilError(f"{path}: {len(images)} images but {len(labels)} labels; get it again")
    return Part(images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64))
