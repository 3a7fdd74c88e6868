"""The handwritten digits that come with scikit-learn: no files, no network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.base import DataSet, LoadedData, Part
from fedveil.tasks.normalization import Normalization

TRAIN = 1437  # the first 80 % of 1,797: scikit-learn's copy has no split of its own


@datasets.register("digits")
@declared
class Digits(DataSet):
    """Handwritten digits, gray 8×8, 1,437 + 360; comes with scikit-learn, needs no files."""

    class_names = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    # Of the training pixels, checked by a test.
    mean = 0.3054
    std = 0.3755

    def load(self, root: Path | None = None) -> LoadedData:
        """The arrays from scikit-learn; `root` is not used."""
        values, labels = load_digits(return_X_y=True)
        # Values are whole numbers from 0 to 16, so these float32 pixels are exact.
        images = (values.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
        labels = labels.astype(np.int64)
        return LoadedData(
            name="digits",
            train=Part(images[:TRAIN], labels[:TRAIN]),
            test=Part(images[TRAIN:], labels[TRAIN:]),
            normalization=Normalization((self.mean,), (self.std,)),
            class_names=self.class_names,
        )
