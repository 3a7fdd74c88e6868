"""The pictures: originals beside what attackers made of them, worst first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.auditing.result import TOGETHER, Images, Result, Row
from fedveil.auditing.roles import Role
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.modalities import modality
from fedveil.report import formatting
from fedveil.report.pictures import are_large, data_uri, most_images, remarks
from fedveil.report.view import beside, lead, shown_roles, strongest, words


@dataclass(frozen=True)
class Cell:
    """A reconstruction in the grid of pictures."""

    picture: str | None
    alt: str
    near: str  # how near it comes to the original
    picked: bool | None  # whether it is nearest to the right one; None where that was not measured
    attack: str = ""  # that made it, where there are several


@dataclass(frozen=True)
class Case:
    """A line of the grid: one image and its reconstructions."""

    picture: str | None  # None where the original is not known
    name: str
    label: str
    cells: list[Cell]


@dataclass(frozen=True)
class Grid:
    """The pictures: the columns' roles and the images, worst first."""

    columns: list[Role]
    cases: list[Case]
    total: int
    near: str  # what is told of each, and how to read it
    several: bool  # whether pictures of one column may come from several attacks
    notes: list[str]
    large: bool  # whether pictures get all the room that a column has, and are drawn smoothly


def grid(result: Result, images: Images) -> Grid:
    """The pictures, those most leaked under the strongest attacker first."""
    kind = modality(result.modality)
    if result.table is not None or result.text is not None:  # see `rows` and `sentences`
        return Grid([], [], 0, "", False, [], False)
    first = lead(result)
    if first is not None and first.attack == TOGETHER and not first.winners:  # of a version that did not keep them
        first = strongest(result, "reconstruct")
    columns: list[tuple[Role, list[Exhibit]]] = []
    missing = []
    for role in shown_roles(result):
        row = beside(result, first, role)
        shown = exhibits(result, images, row, role)
        if not shown:
            missing.append(words(result)[role].who.lower())
        else:
            columns.append((role, shown))
    measured = {name for row in result.rows for name in row.values}
    near = next((name for name in kind.caption if name in measured), kind.caption[-1])
    total = max((len(shown) for _, shown in columns), default=0) if not len(images.originals) else 0
    order = worst_first(first, total or len(images.originals), (*kind.headline[:1], near))
    shape = _shape(images)
    most = most_images(shape, 1 + len(columns))
    cases = [
        Case(
            picture=data_uri(images.originals[index]) if index < len(images.originals) else None,
            name=f"{kind.words.one.capitalize()} {index + 1}",
            label=formatting.target(images.labels[index], result.label_names) if index < len(images.labels) else "",
            cells=[_cell(index, words(result)[role].who, shown, (kind.headline[0], near)) for role, shown in columns],
        )
        for index in order[:most]
    ]
    notes = remarks(images.originals) if len(images.originals) else []
    if missing:
        notes.append(f"No reconstructions to show for: {'; '.join(missing)}.")
    higher = "higher" if METRICS[near].private == "low" else "lower"
    told = f"its {METRICS[near].title} ({higher}: closer to the original) and whether it was {kind.words.picked}"
    return Grid(
        [role for role, _ in columns],
        cases,
        len(order),
        told,
        any(cell.attack for case in cases for cell in case.cells),
        notes,
        are_large(shape),
    )


def _shape(images: Images) -> tuple[int, ...]:
    """That of one picture: where originals are not known, that of the reconstructions."""
    shown = [images.originals, *images.reconstructions.values()]
    return next((pictures.shape[1:] for pictures in shown if len(pictures)), images.originals.shape[1:])


@dataclass(frozen=True, eq=False)
class Exhibit:
    """A reconstruction of one image, and the row that scored it."""

    picture: NDArray[np.float32]
    row: Row | None
    attack: str = ""  # that made it, where there are several


def exhibits(result: Result, images: Images, row: Row | None, role: Role) -> list[Exhibit]:
    """What a role made of every image: of several attacks, for each image that of the one that won."""
    if row is not None and row.winners:
        found = []
        for index, attack in enumerate(row.winners):
            pictures, own = images.reconstructions.get((attack, role)), result.row(role, attack, round=row.round)
            if pictures is not None and index < len(pictures):
                found.append(Exhibit(pictures[index], own, attack))
        return found if len(found) == len(row.winners) else []
    pictures = images.reconstructions.get((row.attack, role)) if row else None
    if pictures is None:
        pictures = next((each for (_, of), each in images.reconstructions.items() if of == role), None)
    return [] if pictures is None else [Exhibit(each, row) for each in pictures]


def _value(row: Row | None, name: str, index: int) -> float:
    values = row.values.get(name, []) if row else []
    return values[index] if index < len(values) else math.nan


def worst_first(row: Row | None, count: int, names: tuple[str, ...]) -> list[int]:
    """The examples in their order, those first that a row gets most of by these metrics."""

    def key(index: int) -> list[float]:
        values = ((METRICS[name].private == "low", _value(row, name, index)) for name in names)
        return [math.inf if math.isnan(value) else -value if low else value for low, value in values]

    return sorted(range(count), key=key)


def _cell(index: int, who: str, exhibits: list[Exhibit], names: tuple[str, str]) -> Cell:
    shown = exhibits[index] if index < len(exhibits) else None
    picked, near = (_value(shown.row if shown else None, name, index) for name in names)
    known = METRICS[names[1]]
    unit = f"{formatting.SPACE}{known.unit}" if known.unit and not math.isnan(near) else ""
    return Cell(
        picture=data_uri(shown.picture) if shown else None,
        attack=shown.attack if shown else "",
        alt=f"Image {index + 1}, {who.lower()}",
        near=formatting.number(near, known.digits) + unit,
        picked=None if math.isnan(picked) else picked >= 0.5,
    )
