"""The figures of a study, from the same audits as its table: what is on them, not how they are drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.observing import kept_observation
from fedveil.auditing.result import Estimate, Which
from fedveil.auditing.roles import Role
from fedveil.defenses.base import Call
from fedveil.streams import Streams
from fedveil.study.definition import Figure, Group, Line, Scaled
from fedveil.study.outcome import Outcome, Value
from fedveil.study.rooms import IndexedStore, named_result
from fedveil.tree import Tree

MOST_PICTURES = 6  # examples in a grid
BINS = 60
DRAWS = 20000  # of every weight, for a variance
WEIGHTS = 21


@dataclass(frozen=True)
class Curve:
    """A line, or the points of a scatter, with its interval."""

    label: str
    x: list[float]
    y: list[Estimate]
    published: bool = False
    x_interval: list[Estimate] = field(default_factory=list)  # of a scatter
    names: list[str] = field(default_factory=list)  # of its points


@dataclass(frozen=True)
class Chart:
    """Axes with curves."""

    title: str
    x: str
    y: str
    curves: list[Curve]
    points: bool = False  # not joined by lines
    log: bool = False


@dataclass(frozen=True)
class Strip:
    """A line of a grid of pictures."""

    label: str
    pictures: NDArray[np.float32]  # (N, channels, h, w) in [0, 1]


@dataclass(frozen=True)
class Pictures:
    """A grid: the originals, then what each row makes of them."""

    title: str
    strips: list[Strip]


Drawing = Chart | Pictures


def figures_of(
    scaled: Scaled, outcome: Outcome, audits: Mapping[str, AuditResult], store: IndexedStore
) -> list[Drawing]:
    """All figures, as far as their audits are there."""
    makers: dict[str, Callable[[Figure, _Gathered], Iterator[Drawing]]] = {
        "lines": _lines,
        "columns": _columns,
        "scatter": _scatter,
        "rounds": _rounds,
        "pictures": _pictures,
        "perturbations": _perturbations,
        "histogram": _histogram,
        "variance": _variance,
    }
    gathered = _Gathered(scaled, outcome, audits, store)
    return [made for figure in scaled.study.figures for made in makers[figure.kind](figure, gathered)]


@dataclass(frozen=True, eq=False)
class _Gathered:
    scaled: Scaled
    outcome: Outcome
    audits: Mapping[str, AuditResult]
    store: IndexedStore

    def groups(self, figure: Figure) -> list[Group]:
        return [group for group in self.scaled.groups if not figure.groups or group.name in figure.groups]

    def rows(self, figure: Figure, group: Group) -> list[Line]:
        return [
            row
            for row in self.scaled.study.rows
            if (not figure.rows or row.name in figure.rows) and (not row.only or group.name in row.only)
        ]

    def value(self, group: Group, row: Line, head: str) -> Value | None:
        return next((each for each in self.outcome.of(group.name, head) if each.row == row.name), None)

    def of(self, group: Group, row: Line) -> list[AuditResult]:
        """The audits of a row by seed; of its first column where columns differ."""
        column = self.scaled.study.columns[0]
        names = [self.scaled.cell_name(group, row, column, seed) for seed in self.scaled.seeds]
        return [self.audits[name] for name in names if name in self.audits]


def _titled(figure: Figure, group: Group, more: str = "") -> str:
    return ", ".join(part for part in (figure.title, group.name, more) if part)


def _heads(figure: Figure, all_: _Gathered) -> list[str]:
    return figure.y or [column.head for column in all_.scaled.study.columns if column.better]


def _lines(figure: Figure, all_: _Gathered) -> Iterator[Chart]:
    """Columns against the rows' own numbers; rows without one are level lines to compare with."""
    for group in all_.groups(figure):
        rows = all_.rows(figure, group)
        placed = sorted((row for row in rows if row.x is not None), key=lambda row: row.x or 0.0)
        level = [row for row in rows if row.x is None]
        for head in _heads(figure, all_):
            curves = []
            for series in dict.fromkeys(row.series for row in placed):
                mine = [(row.x or 0.0, all_.value(group, row, head)) for row in placed if row.series == series]
                curves += _both(series, [(x, value) for x, value in mine if value is not None])
            ends = [row.x or 0.0 for row in (placed[:1] + placed[-1:])]
            for row in level:
                value = all_.value(group, row, head)
                curves += _both(row.name, [(x, value) for x in ends if value is not None])
            if any(not curve.published for curve in curves):
                yield Chart(_titled(figure, group, head), figure.x, head, curves, log=figure.log)


def _columns(figure: Figure, all_: _Gathered) -> Iterator[Chart]:
    """Rows against the numbers in the columns' heads."""
    for group in all_.groups(figure):
        curves, metrics = [], set[str]()
        for row in all_.rows(figure, group):
            values = [(_number(head), all_.value(group, row, head)) for head in all_.outcome.heads]
            curves += _both(row.name, [(x, value) for x, value in values if value is not None])
            metrics |= {value.metric for _, value in values if value is not None}
        if any(not curve.published for curve in curves):
            y = "accuracy" if metrics == {"test"} else ", ".join(sorted(metrics))
            yield Chart(_titled(figure, group), figure.x, y, curves)


def _both(label: str, values: Sequence[tuple[float, Value]]) -> list[Curve]:
    """Ours, and what was published."""
    ours = [(x, value.ours) for x, value in values if value.ours is not None]
    printed = [(x, value.printed) for x, value in values if value.printed is not None]
    found = []
    if ours:
        found.append(Curve(label or "ours", [x for x, _ in ours], [each for _, each in ours]))
    if printed:
        curve = Curve(f"{label}, published" if label else "published", [x for x, _ in printed], [], published=True)
        curve.y.extend(Estimate(mean=each, low=each, high=each, count=1) for _, each in printed)
        found.append(curve)
    return found


def _scatter(figure: Figure, all_: _Gathered) -> Iterator[Chart]:
    (head,) = _heads(figure, all_)[:1]
    for group in all_.groups(figure):
        rows = all_.rows(figure, group)
        curves = []
        for series in dict.fromkeys(row.series or row.name for row in rows):
            mine = [row for row in rows if (row.series or row.name) == series]
            both = [(row.name, all_.value(group, row, figure.x), all_.value(group, row, head)) for row in mine]
            ours = [(n, a.ours, b.ours) for n, a, b in both if a and b and a.ours is not None and b.ours is not None]
            if ours:
                xs, ys, names = [x for _, x, _ in ours], [y for _, _, y in ours], [name for name, _, _ in ours]
                curves.append(Curve(series, [x.mean for x in xs], ys, x_interval=xs, names=names))
        if curves:
            yield Chart(_titled(figure, group), figure.x, head, curves, points=True)


def _rounds(figure: Figure, all_: _Gathered) -> Iterator[Chart]:
    """Test accuracy after every round, the mean over seeds with their range."""
    for group in all_.groups(figure):
        curves = []
        for row in all_.rows(figure, group):
            which: Which = "undefended" if row.defense_in(group.name) == "none" else "defended"
            histories = [audit.result.cost.history for audit in all_.of(group, row)]
            runs = [
                {each.round: getattr(each, which) for each in history if getattr(each, which) is not None}
                for history in histories
            ]
            shared = sorted(set.intersection(*map(set, runs))) if runs else []
            if shared:
                values = [[run[number] for run in runs] for number in shared]
                means = [Estimate(mean=float(np.mean(v)), low=min(v), high=max(v), count=len(v)) for v in values]
                curves.append(Curve(row.name, [float(number) for number in shared], means))
        if curves:
            yield Chart(_titled(figure, group), "round", "test accuracy", curves)


def _pictures(figure: Figure, all_: _Gathered) -> Iterator[Pictures]:
    for group in all_.groups(figure):
        yield from _grid(figure, all_, group, perturbed=False)


def _perturbations(figure: Figure, all_: _Gathered) -> Iterator[Pictures]:
    for group in all_.groups(figure):
        yield from _grid(figure, all_, group, perturbed=True)


def _grid(figure: Figure, all_: _Gathered, group: Group, *, perturbed: bool) -> Iterator[Pictures]:
    strips: list[Strip] = []
    attacks: dict[str, list[Strip]] = {}
    for row in all_.rows(figure, group):
        done = all_.of(group, row)
        if not done or done[0].result.modality != "pictures":
            continue
        images = done[0].images
        originals = images.originals[:MOST_PICTURES]
        strips = strips or [Strip("original", originals)]
        role: Role = "bound" if perturbed else row.role or figure.role
        role = "ceiling" if row.defense_in(group.name) == "none" and not perturbed else role
        for (attack, who), made in images.reconstructions.items():
            if who != role or (figure.attack and attack != figure.attack):
                continue
            mine = attacks.setdefault(attack, [])
            if any(strip.label == row.name for strip in mine):
                continue
            mine.append(Strip(row.name, made[:MOST_PICTURES]))
            if perturbed:
                mine.append(Strip(f"{row.name}: what was added", _stretched(made[:MOST_PICTURES] - originals)))
    for attack, found in attacks.items():
        title = _titled(figure, group, attack if len(attacks) > 1 else "")
        yield Pictures(title, [*strips, *found])


def _stretched(change: NDArray[np.float32]) -> NDArray[np.float32]:
    """Changes of each picture from -largest to +largest as gray to black and white."""
    largest = np.abs(change).reshape(len(change), -1).max(1).reshape(-1, 1, 1, 1)
    return np.asarray(0.5 + change / np.maximum(2 * largest, 1e-12), dtype=np.float32)


def _histogram(figure: Figure, all_: _Gathered) -> Iterator[Chart]:
    """Entries of the first tensor of the updates, which is that of the first layer."""
    for group in all_.groups(figure):
        entries: dict[str, NDArray[np.float64]] = {}
        for row in all_.rows(figure, group):
            experiment = all_.scaled.experiment(group, row, all_.scaled.study.columns[0], all_.scaled.seeds[0])
            key = named_result(all_.store, experiment)
            stages = [each.key for each in all_.store.index.asked(key) if each.stage == "observe"] if key else []
            seen = kept_observation(all_.store, stages[0]) if stages else None
            if seen is None:
                continue
            name = next(iter(seen.defended.message))
            entries.setdefault("without a defense", seen.undefended.message[name].double().flatten().numpy())
            entries[row.name] = seen.defended.message[name].double().flatten().numpy()
        if entries:
            # Between the outer hundredths of all: single entries far out would leave nothing to see.
            low, high = np.quantile(np.concatenate(list(entries.values())), [0.005, 0.995])
            edges = np.linspace(low, high, BINS + 1)
            middles = [float(each) for each in (edges[:-1] + edges[1:]) / 2]
            curves = []
            for label, values in entries.items():
                shares = np.histogram(values, edges)[0] / len(values)
                found = [Estimate(mean=float(s), low=float(s), high=float(s), count=1) for s in shares]
                curves.append(Curve(label, middles, found))
            yield Chart(_titled(figure, group), "entry of the gradient", "share of the entries", curves)


def _variance(figure: Figure, all_: _Gathered) -> Iterator[Chart]:
    """The variance of what each row's defense sends for a weight, over many draws."""
    weights = torch.linspace(0, 1, WEIGHTS)
    for group in all_.groups(figure):
        by_series: dict[str, list[Curve]] = {}
        for row in all_.rows(figure, group):
            column = all_.scaled.study.columns[0]
            (defense,) = all_.scaled.experiment(group, row, column, all_.scaled.seeds[0]).chain.defenses
            update = Tree({"weight": weights.repeat(DRAWS, 1)[None]})
            sent = defense.protect(update, Call(Streams.seeded(0, [0], "variance")))["weight"][0].double()
            spread = sent.var(0)
            found = [Estimate(mean=float(v), low=float(v), high=float(v), count=DRAWS) for v in spread]
            by_series.setdefault(row.series, []).append(Curve(row.name, weights.tolist(), found))
        for series, curves in by_series.items():
            yield Chart(_titled(figure, group, series), figure.x or "weight", "variance", curves, log=False)


def _number(head: str) -> float:
    """The number in a head: "C = 5", "100", "2/3"."""
    found = re.search(r"(\d+(?:\.\d+)?)(?:/(\d+))?", head)
    return 0.0 if found is None else float(found[1]) / float(found[2] or 1)
