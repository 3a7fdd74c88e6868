"""What the page shows, worked out from a result: the template only lays it out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fedveil.auditing.result import AttackRun, Cost, Estimate, Images, Result, Role, Row
from fedveil.leakage.catalog import METRICS
from fedveil.report import words
from fedveil.report.charts import Axis, Series, line_chart
from fedveil.report.pictures import data_uri, remarks

MOST_IMAGES = 16
SMALL_SAMPLE = 30
MOST_COLUMNS = 7  # of the table of numbers: more are cut off on a laptop and on paper
# A chart is drawn for a wide and for a narrow page, so that its text is readable on both.
WIDTHS = {"wide": 720.0, "narrow": 350.0}


@dataclass(frozen=True)
class Cell:
    """A reconstruction in the grid of pictures."""

    picture: str | None
    alt: str
    quality: str
    identified: bool | None


@dataclass(frozen=True)
class Case:
    """A line of the grid: one image and its reconstructions."""

    picture: str
    name: str
    label: str
    cells: list[Cell]


@dataclass(frozen=True)
class Grid:
    """The pictures: the columns' roles and the images, worst first."""

    columns: list[Role]
    cases: list[Case]
    total: int
    quality: str
    notes: list[str]


@dataclass(frozen=True)
class Column:
    """A metric in the table of numbers."""

    name: str
    title: str
    unit: str
    private: str
    words: str
    share: bool
    digits: int

    def mean(self, estimate: Estimate) -> str:
        """The mean as it stands in the table."""
        return words.number(estimate.mean * (100 if self.share else 1), self.digits)

    def interval(self, estimate: Estimate) -> str:
        """The interval below the mean."""
        return words.interval(estimate, 100 if self.share else 1, self.digits)


@dataclass(frozen=True)
class Table:
    """The numbers: rows from what could leak to what cannot be beaten, columns in parts that fit the page."""

    parts: list[list[Column]]
    rows: list[Row]
    by_round: bool  # whether some rows are of one round
    smallest: int | None  # the smallest number of images behind a row, if that is small

    @property
    def columns(self) -> list[Column]:
        """All metrics."""
        return [column for part in self.parts for column in part]


def lead(result: Result) -> Row | None:
    """The attacker the page is about, over all attacked rounds: the verdict's, if it names one."""
    verdict = result.verdict
    named = result.row(verdict.role, verdict.attack) if verdict.role else None
    marked = [row for row in result.rows if row.strongest]
    others = (result.row(role) for role in ("adaptive", "naive", "ceiling"))
    return next((row for row in (named, *marked, *others) if row is not None), None)


def beside(result: Result, role: Role, number: int | None = None) -> Row | None:
    """The row of a role to set beside that attacker, by the same attack for a fair comparison; of a round, if named."""
    first = lead(result)
    rows = [row for row in result.rows if row.role == role and row.round == number]
    same = [row for row in rows if first is not None and row.attack == first.attack]
    return next(iter((*same, *rows)), None)


def grid(result: Result, images: Images) -> Grid:
    """The pictures, those most leaked under the strongest attacker first."""
    columns: list[tuple[Role, Row | None, NDArray[np.float32]]] = []
    missing = []
    roles: list[Role] = ["ceiling", "naive", "adaptive", result.verdict.floor]
    for role in roles:
        pictures = _pictures(result, images, role)
        if pictures is None:
            missing.append(words.ROLES[role].lower())
        else:
            columns.append((role, beside(result, role), pictures))
    # The error of the pixels that are shown, rather than that of the normalized input.
    quality = next((name for name in ("psnr_pixel", "psnr") if any(name in row.values for row in result.rows)), "psnr")
    order = _worst_first(lead(result), len(images.originals), quality)
    cases = [
        Case(
            picture=data_uri(images.originals[index]),
            name=f"Image {index + 1}",
            label=words.label(int(images.labels[index]), result.label_names) if index < len(images.labels) else "",
            cells=[_cell(index, role, row, pictures, quality) for role, row, pictures in columns],
        )
        for index in order[:MOST_IMAGES]
    ]
    notes = remarks(images.originals) if len(images.originals) else []
    if missing:
        notes.append(f"No reconstructions to show for: {'; '.join(missing)}.")
    known = words.metric(quality)
    return Grid([role for role, _, _ in columns], cases, len(order), known.title if known else quality, notes)


def _pictures(result: Result, images: Images, role: Role) -> NDArray[np.float32] | None:
    row = beside(result, role)
    found = images.reconstructions.get((row.attack, role)) if row else None
    if found is None:
        found = next((pictures for (_, of), pictures in images.reconstructions.items() if of == role), None)
    return found


def _value(row: Row | None, name: str, index: int) -> float:
    values = row.values.get(name, []) if row else []
    return values[index] if index < len(values) else math.nan


def _worst_first(row: Row | None, count: int, quality: str) -> list[int]:
    def key(index: int) -> list[float]:
        values = (_value(row, name, index) for name in ("identified", quality))
        return [math.inf if math.isnan(value) else -value for value in values]

    return sorted(range(count), key=key)


def _cell(index: int, role: Role, row: Row | None, pictures: NDArray[np.float32], quality: str) -> Cell:
    identified = _value(row, "identified", index)
    near = _value(row, quality, index)
    known = words.metric(quality)
    unit = f"{words.SPACE}dB" if not math.isnan(near) else ""
    return Cell(
        picture=data_uri(pictures[index]) if index < len(pictures) else None,
        alt=f"Image {index + 1}, {words.ROLES[role].lower()}",
        quality=words.number(near, known.digits if known else 1) + unit,
        identified=None if math.isnan(identified) else identified >= 0.5,
    )


def table(result: Result) -> Table:
    """The numbers of all attackers and floors: over all rounds first, then round by round."""
    present = {name for row in result.rows for name in row.metrics}
    names = [name for name in METRICS if name in present] + sorted(present - METRICS.keys())
    columns = [_column(name) for name in names]
    roles = list(words.ROLES)
    rows = sorted(result.rows, key=lambda row: (row.round or 0, roles.index(row.role)))
    smallest = min((one.count for row in rows for one in row.metrics.values()), default=SMALL_SAMPLE)
    return Table(
        parts=[columns[start : start + MOST_COLUMNS] for start in range(0, len(columns), MOST_COLUMNS)],
        rows=rows,
        by_round=any(row.round is not None for row in rows),
        smallest=smallest if smallest < SMALL_SAMPLE else None,
    )


def _column(name: str) -> Column:
    known = words.metric(name)
    share = words.is_share(name)
    unit = "%" if share else known.unit if known else ""
    private = f"{known.arrow} private" if known else ""
    title, explained, digits = (known.title, known.words, known.digits) if known else (name, "", 3)
    return Column(name, title, unit, private, explained, share, digits)


def cost_charts(cost: Cost) -> dict[str, Markup]:
    """Utility per round with and without the defense; the last round with its interval. Empty without a history."""
    if not cost.history:
        return {}
    rounds = [float(one.round) for one in cost.history]

    def series(label: str, values: list[float | None], final: Estimate | None, style: str) -> Series:
        y = [math.nan if value is None else value for value in values]
        low, high = [math.nan] * len(y), [math.nan] * len(y)
        if final is not None:
            low[-1], high[-1] = final.low, final.high
        return Series(label, rounds, y, low, high, style)

    lines = [
        series("no defense", [one.undefended for one in cost.history], cost.undefended, "ceiling"),
        series("with the defense", [one.defended for one in cost.history], cost.defended, "adaptive"),
    ]
    return {
        name: line_chart(
            lines,
            x=Axis("Round", whole=True),
            y=Axis(f"Test {cost.metric} (↑ more useful)", percent=True),
            title=f"Test {cost.metric} per round, with and without the defense",
            width=width,
        )
        for name, width in WIDTHS.items()
    }


def attack_charts(run: AttackRun) -> dict[str, Markup]:
    """Matching cost against steps for every attacker of a run. Empty without traces."""
    if not run.traces:
        return {}
    lines = [
        Series(words.ROLE_LABELS[trace.role], trace.steps, trace.median, trace.low, trace.high, trace.role)
        for trace in run.traces
    ]
    return {
        name: line_chart(
            lines,
            x=Axis("Step of the attack", whole=True),
            y=Axis("Matching cost, ↑ more private", log=True),
            title=f"Matching cost of {run.attack} against its steps: median and quartiles",
            width=width,
        )
        for name, width in WIDTHS.items()
    }


def cost_rows(cost: Cost) -> Iterator[tuple[str, str, str, str]]:
    """The table of costs: what, without the defense, with it, difference."""
    if cost.defended or cost.undefended:
        yield (
            f"Test {cost.metric}",
            words.percent(cost.undefended, 1),
            words.percent(cost.defended, 1),
            words.points(cost.difference),
        )
    if cost.majority is not None:
        blind = f"{words.number(100 * cost.majority, 1)}{words.SPACE}%"
        yield "The same, always naming the most frequent class", blind, blind, words.NONE
    for name, values in cost.beside.items():
        without, with_it = (values.get(which) for which in ("undefended", "defended"))
        yield (
            f"Test {cost.metric} of {name}, not of the federation's model",
            words.NONE if without is None else f"{words.number(100 * without, 1)}{words.SPACE}%",
            words.NONE if with_it is None else f"{words.number(100 * with_it, 1)}{words.SPACE}%",
            words.NONE,
        )
    if cost.seconds_per_round or cost.slowdown is not None:
        times = cost.seconds_per_round
        ratio = f"{words.number(cost.slowdown)} times as long" if cost.slowdown is not None else words.NONE
        between = cost.slowdown_interval
        if between is not None:
            noise = ", within noise" if between.low <= 1 <= between.high else ""
            ratio += f" {words.between(between.low, between.high)}{noise}"
        yield (
            "Time of a round",
            words.duration(times.get("undefended")),
            words.duration(times.get("defended")),
            ratio,
        )
