"""The numbers of a comparison: a table for people, and records for programs."""

from __future__ import annotations

from typing import Any

from fedveil.auditing.result import Estimate, Question
from fedveil.auditing.roles import Role
from fedveil.leakage.catalog import METRICS
from fedveil.study.comparison import Comparison, Leak, Point
from fedveil.study.tables import Table

HEADS: dict[Question, str] = {"reconstruct": "rebuilt", "link": "linked", "member": "member AUC"}
WHO: dict[Role, str] = {"naive": "naive", "adaptive": "informed"}


def table_of(comparison: Comparison) -> Table:
    """Utility, its loss, and what the naive and the informed attacker get; with the floor and the undefended row."""
    asked = comparison.questions
    heads = ["defense", "strength", comparison.utility, "change"]
    heads += [f"{HEADS[question]}, {who}" for question in asked for who in WHO.values()] + ["guarantee", "front"]
    rows = [["no defense (ceiling)", "", *_utility(comparison, comparison.undefended), *_ceiling(comparison), "", ""]]
    for point in comparison.points:
        found = [_cell(point.leaks.get(question, {}).get(role)) for question in asked for role in WHO]
        promised = "formal" if point.formal else "none"
        front = "/".join(HEADS[question] for question in asked if question in point.front)
        rows.append([point.family, point.moved, *_utility(comparison, point), *found, promised, front])
    floor = [_cell(comparison.floors.get(question)) for question in asked for _ in WHO]
    rows.append(["a guess without the update (floor)", "", "", "", *floor, "", ""])
    seeds = f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"
    notes = [
        f"{comparison.model} on {comparison.data}, {comparison.protocol}, {comparison.rounds} rounds, {seeds}; "
        f"attacked: {comparison.attacked}. Intervals are 95 % over examples and seeds.",
        "front: no other row has more utility and leaks less, by that question, to the stronger of both attackers.",
    ]
    notes += [f"Left out: {name} ({why})" for name, why in comparison.left_out.items()]
    return Table("", heads, rows, words=2, notes=["", *notes])


def records_of(comparison: Comparison) -> list[dict[str, Any]]:
    """One record for each point, question or metric, and role."""
    found = []
    for point in (comparison.undefended, *comparison.points):
        common = {"family": point.family, "defense": point.defense, "strength": point.moved}
        listed: list[tuple[str, str, str, Estimate | None]] = [
            ("utility", comparison.utility, "", point.utility),
            ("utility", f"{comparison.utility} lost or gained", "", point.loss),
        ]
        for question, leaks in point.leaks.items():
            listed += [(question, leak.measure, role, leak.found) for role, leak in leaks.items()]
        for role, metrics in point.metrics.items():
            listed += [("metric", name, role, each) for name, each in metrics.items()]
        for what, name, who, each in listed:
            if each is not None:
                found.append({**common, "what": what, "measure": name, "role": who, **each.model_dump()})
    return found


def _utility(comparison: Comparison, point: Point) -> list[str]:
    read = comparison.measured
    factor = 100 if read.share else 1
    half = factor * (point.utility.high - point.utility.low) / 2
    change = "" if point.loss is None else read.change(point.loss.mean)
    return [f"{read.shown(point.utility.mean)} ± {half:.{1 if read.share else 3}f}", change]


def _ceiling(comparison: Comparison) -> list[str]:
    leaks = (comparison.undefended.leaks.get(question, {}).get("ceiling") for question in comparison.questions)
    return [_cell(each) for each in leaks for _ in WHO]


def _cell(leak: Leak | None) -> str:
    if leak is None:
        return "–"
    metric = METRICS[leak.measure]
    factor, digits = (100, 0) if metric.share else (1, 2)
    low, high = (f"{factor * value:.{digits}f}" for value in (leak.found.low, leak.found.high))
    return f"{metric.format(leak.found.mean)} [{low}, {high}]"
