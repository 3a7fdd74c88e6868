"""Breast cancer Wisconsin (diagnostic), which comes with scikit-learn: no files, no network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.columns import Column, Columns
from fedveil.tasks.datasets.base import DataSet
from fedveil.tasks.datasets.table import LoadedTable, held_out


@datasets.register("breast-cancer")
@declared
class BreastCancer(DataSet):
    """Measurements of cell nuclei, malignant or benign: a table of 30 numbers, 456 + 113 rows; needs no files."""

    class_names = ("malignant", "benign")

    def load(self, root: Path | None = None) -> LoadedTable:
        """The table from scikit-learn; `root` is not used. Every fifth row of each class is the test part."""
        found = load_breast_cancer()
        train, test = held_out(found.data.astype(np.float64), found.target.astype(np.int64))
        columns = Columns(tuple(Column(str(name)) for name in found.feature_names))
        return LoadedTable("breast-cancer", columns, train, test, self.class_names)
