"""The columns of a table: numbers and categories, and how a row of cells becomes what a model takes.

A *cell* is a number, or the place of a category in its column's list. A model takes a *row* of places: a number stands
at one place, standardized; a category at as many as its column has, of which one is 1 and the others are 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import FedveilError, printable, shortened, unknown_name

MOST_CATEGORIES = 100  # different texts of one column: more are names or notes, which no model can learn from
INFERRED = "inferred"  # in place of a list of columns
Cells = NDArray[np.float64]  # (rows, columns)


@dataclass(frozen=True)
class Column:
    """A column of a table, as everyone knows it.

    >>> Column("age"), Column("smoker", categories=("no", "yes")).width
    (Column(name='age', categories=(), low=None, high=None, mean=0.0, std=1.0), 2)
    """

    name: str
    categories: tuple[str, ...] = ()  # empty: the column holds numbers
    low: float | None = None  # the range of numbers; by default that of the data
    high: float | None = None
    mean: float = 0.0  # of the training part, by which numbers are standardized
    std: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(str(self.name)))
        object.__setattr__(self, "categories", tuple(printable(str(each)) for each in self.categories))
        if not self.name:
            raise FedveilError("every column of a table needs a name")
        if self.categories and len(set(self.categories)) < max(2, len(self.categories)):
            raise FedveilError(f"column '{self.name}' needs at least two different categories, got {self.categories}")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise FedveilError(f"column '{self.name}': low must be less than high (got {self.low} and {self.high})")

    @property
    def width(self) -> int:
        """How many places of a model's input it takes."""
        return len(self.categories) or 1


@dataclass(frozen=True)
class Columns:
    """The columns of a table in their order."""

    all: tuple[Column, ...]

    def __post_init__(self) -> None:
        names = [column.name for column in self.all]
        if not names:
            raise FedveilError("a table needs at least one column")
        name, times = Counter(names).most_common(1)[0]
        if times > 1:
            raise FedveilError(f"{times} columns of the table are named '{name}': give each a name of its own")

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Column]:
        return iter(self.all)

    @property
    def width(self) -> int:
        """How many places a row has as the model takes it."""
        return sum(column.width for column in self.all)

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Where each column stands in a row as the model takes it."""
        ends = np.cumsum([column.width for column in self.all]).tolist()
        return tuple(slice(end - column.width, end) for end, column in zip(ends, self.all, strict=True))

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Where categories stand: the first place of each such column, and the place behind its last."""
        pairs = zip(self.all, self.places, strict=True)
        return tuple((place.start, place.stop) for column, place in pairs if column.categories)

    def encode(self, cells: Tensor) -> Tensor:
        """Rows (..., width) as the model takes them, of cells (..., columns)."""
        values = cells[..., self._by_place("column").long()]
        numbers = (values - self._by_place("mean").to(values)) / self._by_place("std").to(values)
        category = self._by_place("category").to(values)
        return torch.where(category < 0, numbers, (values == category).to(values))

    def cells(self, rows: Tensor) -> Tensor:
        """The cells (..., columns) of rows (..., width): of categories, the one whose place has the largest value."""
        found = [
            rows[..., place].argmax(-1).to(rows)
            if column.categories
            else rows[..., place.start] * column.std + column.mean
            for column, place in zip(self.all, self.places, strict=True)
        ]
        return torch.stack(found, -1)

    def settled(self, rows: Tensor) -> Tensor:
        """Rows in which each category is one of its column's: 1 at one place and 0 at the others."""
        found = rows.clone()
        for start, stop in self.blocks:
            block = rows[..., start:stop]
            found[..., start:stop] = torch.zeros_like(block).scatter(-1, block.argmax(-1, keepdim=True), 1.0)
        return found

    def box(self) -> tuple[Tensor, Tensor]:
        """The lowest and the highest row that is valid."""
        ends = []
        for name, end in (("low", 0.0), ("high", 1.0)):
            numbers = [getattr(column, name) for column in self.all]
            standard = [
                end if column.categories else (number - column.mean) / column.std
                for column, number in zip(self.all, numbers, strict=True)
            ]
            ends.append(torch.tensor(standard)[self._by_place("column").long()])
        return ends[0], ends[1]

    def _by_place(self, what: str) -> Tensor:
        return self._tensors[what]

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """What belongs to each place: its column's number, mean and deviation, and its category, −1 for a number."""
        listed = [
            (number, column.mean, column.std, category if column.categories else -1)
            for number, column in enumerate(self.all)
            for category in range(column.width)
        ]
        made = zip(("column", "mean", "std", "category"), zip(*listed, strict=True), strict=True)
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in made}

    def fitted(self, train: Tensor, every: Tensor) -> Columns:
        """The same with the training cells' means and deviations, and ranges of all cells where none is declared."""
        return Columns(
            tuple(
                column if column.categories else _fitted(column, train[:, place], every[:, place])
                for place, column in enumerate(self.all)
            )
        )

    def described(self) -> list[Any]:
        """All of it as plain data."""
        return [[c.name, list(c.categories), c.low, c.high, c.mean, c.std] for c in self.all]


def _fitted(column: Column, train: Tensor, every: Tensor) -> Column:
    low, high = (float(end) for end in every.aminmax())
    for name, end, wrong in (("low", column.low, low), ("high", column.high, high)):
        if end is not None and (wrong < end if name == "low" else wrong > end):
            raise FedveilError(f"column '{column.name}' holds {wrong:g}, and its {name} is said to be {end:g}")
    mean, std = float(train.mean()), float(train.std(correction=0))
    if not std > 1e-12 * max(abs(mean), 1e-300):
        raise FedveilError(
            f"column '{column.name}' has a single value, {mean:g}, in all training rows: leave it out, it tells nothing"
        )
    return replace(
        column,
        low=low if column.low is None else column.low,
        high=high if column.high is None else column.high,
        mean=mean,
        std=std,
    )


# ---- from what people have ---------------------------------------------------------------------------------------


def read_columns(
    given: Mapping[str, Sequence[Any] | NDArray[Any]], known: Mapping[str, Column] | None = None
) -> tuple[Columns, Cells]:
    """Columns and cells of values by column name: those that are not known are inferred.

    Values are numbers, or texts; a column whose texts are not all numbers is one of categories.
    """
    known = known or {}
    made = [_read(name, np.asarray(values), known.get(name)) for name, values in given.items()]
    if not made:
        raise FedveilError("a table needs at least one column")
    lengths = {len(cells) for _, cells in made}
    if len(lengths) > 1:
        raise FedveilError(f"the columns of the table differ in length: {', '.join(map(str, sorted(lengths)))} rows")
    return Columns(tuple(column for column, _ in made)), np.stack([cells for _, cells in made], axis=1)


def _read(name: str, values: NDArray[Any], known: Column | None) -> tuple[Column, NDArray[np.float64]]:
    if values.ndim != 1:
        raise FedveilError(f"column '{name}' must be one list of values, not of shape {values.shape}")
    texts = not (np.issubdtype(values.dtype, np.number) or values.dtype == bool)
    if known is not None and not known.categories:
        return known, _numbers(known.name, values)
    if known is None and not texts and values.dtype != bool:
        return Column(name), _numbers(name, values)
    if known is None and texts and all(number_of(text) is not None for text in values):
        return Column(name), _numbers(name, values)
    said = [printable(str(value).strip()) for value in values]
    if known is None:
        known = Column(name, categories=inferred_categories(name, said))
    number = {category: place for place, category in enumerate(known.categories)}
    for row, text in enumerate(said):
        if text not in number:
            few = shortened(", ".join(known.categories), 60)
            raise FedveilError(f"column '{name}' holds '{shortened(text, 40)}' in row {row + 1}, not one of {few}")
    return known, np.array([number[text] for text in said], dtype=np.float64)


def read_rows(given: Any, columns: Sequence[str | Column] | str, what: str) -> tuple[Columns, Cells]:
    """Columns and cells of a table of one's own: an array (rows, columns), or a list of values by column name.

    columns: the columns in their order, each by its name or as a `Column`; "inferred": all of a table by name. In an
    array a category is the number of its place in the column's list.
    """
    if isinstance(columns, str) and columns != INFERRED:
        raise FedveilError(
            f"columns must be a list of names or columns, or '{INFERRED}', not '{shortened(columns, 40)}'"
        )
    if isinstance(given, Mapping):
        named = {str(name): values for name, values in given.items()}
        asked = tuple(named) if isinstance(columns, str) else tuple(columns)
        known = {each.name: each for each in asked if isinstance(each, Column)}
        names = [each.name if isinstance(each, Column) else str(each) for each in asked]
        missing = next((name for name in names if name not in named), None)
        if missing is not None:
            raise unknown_name(f"column of {what}", missing, named)
        return read_columns({name: named[name] for name in names}, known)
    rows = np.asarray(given)
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.number) or np.iscomplexobj(rows):
        raise FedveilError(
            f"{what} must be an array of numbers (rows, columns), or a dict of a list of values for each column, not "
            f"{rows.dtype} of shape {rows.shape}"
        )
    if isinstance(columns, str):
        columns = [f"column {number + 1}" for number in range(rows.shape[1])]
    if len(columns) != rows.shape[1]:
        raise FedveilError(f"{what} have {rows.shape[1]} columns, and {len(columns)} are named: name each of them")
    made = Columns(tuple(each if isinstance(each, Column) else Column(str(each)) for each in columns))
    cells = np.stack([_numbers(column.name, rows[:, place]) for place, column in enumerate(made)], axis=1)
    for place, column in enumerate(made):
        if column.categories and not np.isin(cells[:, place], np.arange(column.width)).all():
            raise FedveilError(
                f"column '{column.name}' must hold the numbers of its categories, 0 to {column.width - 1}"
            )
    return made, cells


def inferred_categories(name: str, texts: Sequence[str]) -> tuple[str, ...]:
    """The different texts of a column, in order."""
    found = sorted(set(texts))
    if len(found) < 2:
        only = f"'{shortened(found[0], 40)}'" if found else "nothing"
        raise FedveilError(f"column '{name}' has a single value, {only}, in all rows: leave it out, it tells nothing")
    if len(found) > MOST_CATEGORIES:
        raise FedveilError(
            f"column '{name}' has {len(found):,} different texts, and a category at most {MOST_CATEGORIES}: leave it "
            "out, or make it numbers"
        )
    return tuple(found)


def _numbers(name: str, values: NDArray[Any]) -> NDArray[np.float64]:
    numeric = np.issubdtype(values.dtype, np.number) and not np.iscomplexobj(values)
    read = values if numeric else [number_of(value) for value in values]
    found = np.array([np.nan if number is None else number for number in read], dtype=np.float64)
    if not np.isfinite(found).all():
        row = int(np.isfinite(found).argmin())
        text = printable(shortened(str(values[row]), 40))
        wrong = "NaN or infinity" if read[row] is not None else f"'{text}', which is no number,"
        raise FedveilError(f"column '{name}' holds {wrong} in row {row + 1}: fill it, or leave the row out")
    return found


def number_of(value: Any) -> float | None:
    """A number, or a text as one; None if it is none. Underscores between digits are Python's own habit, not data's."""
    if isinstance(value, str) and "_" in value:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
