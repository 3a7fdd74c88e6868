"""The form of data sets of tables: rows of cells with a class each, in the columns that all parts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.errors import FedveilError
from fedveil.tasks.columns import Cells, Columns
from fedveil.tasks.tables import TableExamples

HELD_OUT = 5  # of a table without a test part, one in this many rows of each class


@dataclass(frozen=True, eq=False)
class TablePart:
    """Cells (N, columns), see `Columns`, and class numbers."""

    cells: Cells
    labels: NDArray[np.int64]

    multi_label: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> Cells:
        """The rows, under the name that a `Part` has for its examples."""
        return self.cells


@dataclass(frozen=True, eq=False)
class LoadedTable:
    """The rows of a data set in its own split."""

    name: str
    columns: Columns
    train: TablePart
    test: TablePart
    class_names: tuple[str, ...]
    note: str = ""

    normalization: ClassVar[None] = None  # numbers are standardized by their column
    validation: ClassVar[None] = None

    def __post_init__(self) -> None:
        for label, part in self.parts.items():
            if not len(part):
                raise FedveilError(f"{self.name} ({label}): no rows")

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def parts(self) -> dict[str, TablePart]:
        """The parts by name."""
        return {"train": self.train, "test": self.test}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row as the model takes it."""
        return (self.columns.width,)

    @cached_property
    def sha256(self) -> str:
        """The hash of all cells, labels and columns, independent of their files."""
        return self.examples(list(self.parts.values())).source_sha256

    def examples(self, parts: Sequence[TablePart]) -> TableExamples:
        """The rows of some parts, one part after another."""
        cells = torch.from_numpy(np.concatenate([part.cells for part in parts]))
        return TableExamples(self.columns, cells, torch.from_numpy(np.concatenate([part.labels for part in parts])))


def held_out(cells: Cells, labels: NDArray[np.int64]) -> tuple[TablePart, TablePart]:
    """A training and a test part: every fifth row of each class is the test."""
    seen = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        seen[mine] = np.arange(1, len(mine) + 1)
    test = seen % HELD_OUT == 0
    if not test.any():
        raise FedveilError(f"no class has {HELD_OUT} rows, to hold one out for the test: give more rows")
    return TablePart(cells[~test], labels[~test]), TablePart(cells[test], labels[test])
