"""Rows of a table: originals beside what attackers made of them, cell by cell, worst first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedveil.auditing.result import Images, Result, TableColumn, TableLegend
from fedveil.auditing.roles import Role
from fedveil.leakage.modalities import modality
from fedveil.report import formatting
from fedveil.report.grid import exhibits, worst_first
from fedveil.report.view import beside, lead, shown_roles

MOST_ROWS = 6  # that are shown, a table each


@dataclass(frozen=True)
class Mark:
    """A cell as an attacker got it."""

    text: str
    recovered: bool


@dataclass(frozen=True)
class Line:
    """A column of the table: its value in the original and in every reconstruction."""

    name: str
    original: str
    marks: list[Mark]


@dataclass(frozen=True)
class ShownRow:
    """One row of the attacked table, turned on its side."""

    name: str
    label: str
    lines: list[Line]
    recovered: list[str]  # of each reconstruction: how many cells


@dataclass(frozen=True)
class Rows:
    """The rows that are shown, and the roles of the columns."""

    columns: list[Role]
    shown: list[ShownRow]
    total: int
    tolerance: float


def rows(result: Result, images: Images) -> Rows | None:
    """The most leaked rows first; None where no table was attacked."""
    table, first = result.table, lead(result)
    if table is None:
        return None
    kind = modality(result.modality)
    found = [(role, exhibits(result, images, beside(result, first, role), role)) for role in shown_roles(result)]
    columns = [(role, [each.picture for each in shown]) for role, shown in found if shown]
    order = worst_first(first, len(images.originals), (*kind.headline[:1], *kind.caption[:1]))
    shown = []
    for index in order[:MOST_ROWS]:
        original = images.originals[index]
        made = [cells[index] for _, cells in columns if index < len(cells)]
        right = [recovered(table, original, cells) for cells in made]
        lines = [
            Line(
                name=column.name,
                original=written(column, original[place]),
                marks=[
                    Mark(written(column, cells[place]), bool(hits[place]))
                    for cells, hits in zip(made, right, strict=True)
                ],
            )
            for place, column in enumerate(table.columns)
        ]
        label = formatting.label(int(images.labels[index]), result.label_names)
        counts = [f"{int(hits.sum())} of {len(hits)}" for hits in right]
        shown.append(ShownRow(f"{kind.words.one.capitalize()} {index + 1}", label, lines, counts))
    return Rows([role for role, _ in columns], shown, len(order), table.tolerance)


def recovered(table: TableLegend, original: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Which cells of a row were recovered: categories exactly, numbers within the tolerance."""
    far = np.abs(original.astype(np.float64) - cells.astype(np.float64))
    allowed = [0.5 if column.categories else table.tolerance * column.std for column in table.columns]
    found: np.ndarray = far <= np.array(allowed)
    return found


def written(column: TableColumn, cell: float) -> str:
    """A cell as the table has it.

    >>> written(TableColumn(name="age", std=9.0), 41.25), written(TableColumn(name="sex", categories=["f", "m"]), 1.0)
    ('41.25', 'm')
    """
    if column.categories:
        place = int(cell)
        return column.categories[place] if 0 <= place < len(column.categories) else formatting.NONE
    return f"{float(cell):.4g}".replace("-", "\N{MINUS SIGN}")
