"""A table of one's own in a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import FedveilError, printable, shortened, unknown_name
from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.columns import Cells, Column, Columns, inferred_categories, number_of, read_columns
from fedveil.tasks.datasets.base import DataSet
from fedveil.tasks.datasets.table import LoadedTable, TablePart, held_out
from fedveil.tasks.formats.csv_file import CsvTable, read_csv
from fedveil.tasks.sources import data_root

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})  # in small letters


@datasets.register("csv")
@declared
class CsvFile(DataSet):
    """Your own table: path=FILE.csv,target=COLUMN. The first line names the columns; the target holds classes.

    A column whose values are all numbers is one of numbers, any other one of categories; `categories` names columns of
    numbers that are codes. Without a test file every fifth row of each class is the test part.
    """

    path: str  # file of the rows, from the working folder or from the data root
    target: str  # the column to predict
    test: str = ""  # file of the test rows, with the same columns
    categories: tuple[str, ...] = ()  # columns of numbers that are codes of categories
    drop: tuple[str, ...] = ()  # columns to leave out, such as names
    missing: Literal["refuse", "drop"] = "refuse"  # drop: leave out rows in which a value is missing

    def load(self, root: Path | None = None) -> LoadedTable:
        """Read the file, and that of the test rows if there is one."""
        table, left = self._read(self.path, root)
        names = [name for name in table.header if name != self.target and name not in self.drop]
        if not names:
            raise FedveilError(f"{table.path}: there is no column beside the target: a model needs something to go by")
        known = {name: self._coded(table, name) for name in self.categories}
        columns, cells = _located(table, names, known)
        classes = _classes(table, self.target)
        labels = _labels(table, self.target, classes)
        if not self.test:
            train, test = held_out(cells, labels)
        else:
            train, (test, more) = TablePart(cells, labels), self._test(root, columns, classes)
            left += more
        note = f"{left:,} row{'s' * (left != 1)} with a missing value left out" if left else ""
        return LoadedTable(table.path.name, columns, train, test, tuple(map(printable, classes)), note)

    def _read(self, given: str, root: Path | None) -> tuple[CsvTable, int]:
        """A file with all columns that are named, and how many rows were left out."""
        table = read_csv(_found(given, root))
        for name in (self.target, *self.categories, *self.drop):
            if name not in table.header:
                raise unknown_name(f"column of {table.path}", shortened(name, 40), table.header)
        if self.target in (*self.categories, *self.drop):
            raise FedveilError(f"csv: '{self.target}' is the target: it cannot be among categories or drop")
        used = [place for place, name in enumerate(table.header) if name not in self.drop]
        gaps: set[int] = set()
        for place, row in enumerate(table.rows):
            for column in used:
                if row[column].lower() in MISSING:
                    if self.missing == "refuse":
                        raise FedveilError(
                            f"{table.path}: line {table.lines[place]} has no value in column '{table.header[column]}': "
                            "fill it, leave the column out (drop), or leave out such rows (missing=drop)"
                        )
                    gaps.add(place)
        if len(gaps) == len(table.rows):
            raise FedveilError(f"{table.path}: a value is missing in every row")
        return table.without(gaps), len(gaps)

    def _coded(self, table: CsvTable, name: str) -> Column:
        return Column(name, categories=inferred_categories(name, [printable(text) for text in table.column(name)]))

    def _test(self, root: Path | None, columns: Columns, classes: list[str]) -> tuple[TablePart, int]:
        table, left = self._read(self.test, root)
        missing = next((column.name for column in columns if column.name not in table.header), None)
        if missing is not None:
            raise FedveilError(f"{table.path}: there is no column '{missing}', which the training file has")
        _, cells = _located(table, [c.name for c in columns], {column.name: column for column in columns})
        return TablePart(cells, _labels(table, self.target, classes)), left


def _found(given: str, root: Path | None) -> Path:
    path = Path(given).expanduser()
    for choice in (path, data_root(root) / path):
        if choice.is_file():
            return choice
    raise FedveilError(f"csv: there is no file {path}, neither here nor in {data_root(root)}")


def _located(table: CsvTable, names: list[str], known: dict[str, Column]) -> tuple[Columns, Cells]:
    try:
        return read_columns({name: table.column(name) for name in names}, known)
    except FedveilError as error:
        raise FedveilError(f"{table.path}: {error}") from None


def _classes(table: CsvTable, target: str) -> list[str]:
    """The different values of the target, numbers by size."""
    found = set(table.column(target))
    numbers = {text: number_of(text) for text in found}
    if len(found) < 2:
        only = printable(shortened(found.pop(), 40))
        raise FedveilError(f"{table.path}: the target '{target}' has a single value, '{only}'")
    if len(found) > max(2, len(table.rows) // 2):
        raise FedveilError(
            f"{table.path}: the target '{target}' has {len(found):,} different values in {len(table.rows):,} rows: "
            "name a column of classes"
        )
    return sorted(found, key=lambda text: (0.0 if numbers[text] is None else numbers[text], text))


def _labels(table: CsvTable, target: str, classes: list[str]) -> NDArray[np.int64]:
    number = {text: place for place, text in enumerate(classes)}
    for line, text in zip(table.lines, table.column(target), strict=True):
        if text not in number:
            raise FedveilError(
                f"{table.path}: line {line} has the class '{printable(shortened(text, 40))}', which no training row has"
            )
    return np.array([number[text] for text in table.column(target)], dtype=np.int64)
