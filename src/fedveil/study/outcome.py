"""What a study came to: our numbers beside the published ones, and what they say together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import TOGETHER, Document, Estimate, Result, Row, Which
from fedveil.auditing.roles import Role
from fedveil.leakage.catalog import METRICS
from fedveil.study.definition import UTILITY, Group, Line, Read, Scaled
from fedveil.study.pairing import Sample
from fedveil.study.seeds import over_seeds, pooled
from fedveil.study.tables import Table
from fedveil.tasks.measures import measure

NUMBER = re.compile(r"-?\d+(\.\d+)?")  # "0.986 ± 0.004" and "0.2419 (-0.0384)" start with the number itself


class Value(Document):
    """A cell: ours, and what was published; either may be missing."""

    group: str
    row: str
    column: str
    metric: str
    better: str
    ours: Estimate | None = None  # in the published unit
    published: str = ""
    # The same metric for the attacker who knows the defense, and of the perturbed input, where they were measured.
    informed: Estimate | None = None
    perturbed: Estimate | None = None
    # One value for each example, in our unit, to compare rows pair by pair; None of utilities.
    sample: Sample | None = None
    informed_sample: Sample | None = None
    perturbed_sample: Sample | None = None
    missing: str = ""  # why there is none of ours

    @property
    def printed(self) -> float | None:
        """The published number."""
        found = NUMBER.match(self.published)
        return None if found is None else float(found[0])


class Outcome(Document):
    """A study's table at one scale."""

    title: str
    paper: str
    scale: str
    cuts: list[str]
    notes: list[str]
    seeds: list[int]
    heads: list[str]
    rows: list[str]
    own: list[str]  # the rows of the method that the paper proposes
    values: list[Value]

    def of(self, group: str, column: str) -> list[Value]:
        """The values of one column in one group, row by row."""
        return [value for value in self.values if (value.group, value.column) == (group, column)]

    @property
    def groups(self) -> list[str]:
        """The blocks of the table."""
        return list(dict.fromkeys(value.group for value in self.values))

    def table(self) -> Table:
        """Ours ± half the interval, the published number in brackets."""
        rows: list[list[str]] = []
        groups: dict[int, str] = {}
        for group in self.groups:
            if group:
                groups[len(rows)] = group
            for row in self.rows:
                mine = {each.column: each for each in self.values if (each.group, each.row) == (group, row)}
                if not mine:
                    continue
                rows.append([row, *(_cell(mine[head]) for head in self.heads)])
        scale = f"Scale: {self.scale}." + (
            f" Cut from the published setting: {'; '.join(self.cuts)}." if self.cuts else ""
        )
        empty = dict.fromkeys(each.missing for each in self.values if each.missing)
        notes = [
            "",
            "Ours ± half the 95 % interval [published].",
            scale,
            *(f"Empty: {why}." for why in empty),
            *self.notes,
        ]
        return Table(
            f"{self.paper}, {self.title}" if self.paper else self.title, ["", *self.heads], rows, 1, notes, groups
        )

    def records(self) -> list[dict[str, object]]:
        """One record for each cell."""
        return [
            {
                **{name: getattr(value, name) for name in ("group", "row", "column", "metric", "published")},
                **{name: getattr(value.ours, name, "") for name in ("mean", "low", "high", "count")},
                "informed": getattr(value.informed, "mean", ""),
                "perturbed": getattr(value.perturbed, "mean", ""),
                "scale": self.scale,
                "missing": value.missing,
            }
            for value in self.values
        ]


def outcome_of(scaled: Scaled, audits: Mapping[str, AuditResult], missing: Mapping[str, str]) -> Outcome:
    """The table from the audits by their cells' names; `missing` says why others are not there."""
    cells, study = scaled.cells(), scaled.study
    values = []
    for group, row, column in scaled.places():
        names = [scaled.cell_name(group, row, column, seed) for seed in scaled.seeds]
        assert all(name in cells for name in names)
        printed = study.published.get(group.name, {}).get(row.name, [""] * len(study.columns))
        place = study.columns.index(column)
        done = [audits[name] for name in names if name in audits]
        why = next((missing[name] for name in names if name in missing), "")
        values.append(_value(group, row, column, done, printed[place], why))
    return Outcome(
        title=study.title,
        paper=study.paper,
        scale=scaled.scale,
        cuts=scaled.cuts(),
        notes=study.notes,
        seeds=scaled.seeds,
        heads=[column.head for column in study.columns],
        rows=[row.name for row in study.rows],
        own=[row.name for row in study.rows if row.own],
        values=values,
    )


def _value(group: Group, row: Line, column: Read, audits: Sequence[AuditResult], printed: str, why: str) -> Value:
    results = [audit.result for audit in audits]
    metric = row.metric or column.metric
    asked: Role = row.role or column.role
    bare = row.defense_in(group.name) == "none" and asked in ("naive", "adaptive")
    role: Role = "ceiling" if bare else asked
    ours = _read(results, metric, role, row, column) if results else None
    if results and ours is None and role == "adaptive":  # the defense does not say what an informed attacker would do
        ours = _read(results, metric, "naive", row, column)
    leaks = metric not in UTILITY and not column.at
    made = Value(
        group=group.name,
        row=row.name,
        column=column.head,
        metric=metric,
        better=column.better,
        ours=_scaled(ours, column.factor),
        published=printed,
        missing=why if not results else "" if ours is not None else f"{metric} was not measured ({role})",
    )
    if not leaks or not results:
        return made
    update: dict[str, Any] = {"sample": _sample(audits, metric, role, row, column)}
    for name, other in (("informed", "adaptive"), ("perturbed", "bound")) if role == "naive" else ():
        update[name] = _scaled(_read(results, metric, other, row, column), column.factor)  # type: ignore[arg-type]
        update[f"{name}_sample"] = _sample(audits, metric, other, row, column)  # type: ignore[arg-type]
    return made.model_copy(update=update)


def _sample(audits: Sequence[AuditResult], metric: str, role: Role, row: Line, column: Read) -> Sample | None:
    found = [_leak(audit.result, metric, role, row.round, column) for audit in audits]
    values = [values for each in found if each is not None for values in (each[1],)]
    attacks = audits[0].result.attacks
    per_update = attacks[0].batch_size if attacks and metric != "linked" else 1
    return Sample.of(audits, values, per_update) if len(values) == len(audits) else None


def _read(results: Sequence[Result], metric: str, role: Role, row: Line, column: Read) -> Estimate | None:
    found = [
        _utility(each, metric) if metric in UTILITY else _leak(each, metric, role, row.round, column)
        for each in results
    ]
    known = [each for each in found if each is not None]
    if len(known) < len(results):
        return None
    if metric in UTILITY or column.at or metric.startswith("member"):  # not means over examples
        shares = metric in ("test", "validation", "local") and measure(results[0].cost.metric).share
        return pooled([estimate for estimate, _ in known], share=shares)
    size = results[0].attacks[0].batch_size if results[0].attacks else 1
    return over_seeds(known, share=METRICS[metric].yes_or_no, per_update=size)


def _utility(result: Result, metric: str) -> tuple[Estimate, list[float]] | None:
    cost = result.cost
    which: Which = "defended" if cost.defended is not None else "undefended"
    if metric == "test":
        estimate = cost.defended if cost.defended is not None else cost.undefended
        return None if estimate is None else (estimate, [])
    if metric == "mcc":
        found = cost.others.get("MCC", {})
        return (_exactly(found[which]), []) if which in found else None
    if metric == "local":
        local = [values[which] for name, values in cost.beside.items() if which in values]
        return (_exactly(local[0]), []) if local else None
    if metric == "seconds":
        return (_exactly(cost.seconds_per_round[which]), []) if which in cost.seconds_per_round else None
    if metric == "slowdown":
        return None if cost.slowdown is None else (cost.slowdown_interval or _exactly(cost.slowdown), [])
    known = [each.validation[which] for each in cost.history if which in each.validation]
    return (_exactly(known[-1]), []) if known else None


def _exactly(value: float) -> Estimate:
    """A number whose spread over examples is not kept: only that over seeds is then known."""
    return Estimate(mean=value, low=value, high=value, count=1)


def _leak(result: Result, metric: str, role: Role, number: int, column: Read) -> tuple[Estimate, list[float]] | None:
    if column.at:
        runs = [run for run in result.attacks if not column.attack or run.attack == column.attack]
        if metric == "attack_loss":
            curves = [c for run in runs for c in run.curves if c.role == role and len(c.median)]
            share = {"1/3": 1 / 3, "2/3": 2 / 3, "all": 1.0}[column.at]
            return (
                (_exactly(curves[0].median[max(round(share * len(curves[0].median)) - 1, 0)]), []) if curves else None
            )
        marks = [run.on_the_way.get(role, {}).get(metric, {}).get(column.at) for run in runs]
        return next(((each, []) for each in marks if each is not None), None)
    rows = [
        row
        for row in result.rows
        if row.role == role and row.round == (number or None) and metric in row.metrics and row.attack != TOGETHER
    ]
    rows = [row for row in rows if not column.attack or row.attack in (column.attack, "")]
    if not rows:
        return None
    best: Row = rows[0]
    for row in rows[1:]:
        best = row if METRICS[metric].leaks_more(row.metrics[metric].mean, best.metrics[metric].mean) else best
    return best.metrics[metric], best.values.get(metric, [])


def _scaled(estimate: Estimate | None, factor: float) -> Estimate | None:
    if estimate is None or factor == 1:
        return estimate
    ends = {name: factor * getattr(estimate, name) for name in ("mean", "low", "high")}
    return estimate.model_copy(update=ends)


def _cell(value: Value) -> str:
    digits = len(value.published.partition(".")[2]) if value.published else 3
    ours = "–"
    if value.ours is not None:
        half = (value.ours.high - value.ours.low) / 2
        ours = f"{value.ours.mean:.{digits}f}" + (f" ± {half:.{digits}f}" if half else "")
    return f"{ours} [{value.published}]" if value.published else ours
