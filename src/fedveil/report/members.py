"""Who tells members from others: the lines of the table, and ROC curves."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedveil.auditing.result import Result, Roc, Row
from fedveil.auditing.roles import ROLES
from fedveil.auditing.table import formal_bound
from fedveil.leakage.catalog import METRICS, Metric
from fedveil.leakage.membership import AUC, CHANCE
from fedveil.report import formatting
from fedveil.report.charts import Axis, Series, interval_bar, line_chart
from fedveil.report.view import WIDTHS, words

_POINTS = 60  # of a drawn curve


@dataclass(frozen=True)
class Teller:
    """A line on one who tells members from others."""

    row: Row
    who: str
    looked_at: str
    pairs: str  # the AUC as a share of pairs
    bar: Markup
    cells: list[tuple[str, str]]  # of each metric the mean and the interval, or that it was not measured
    allowed: str


@dataclass(frozen=True)
class Drawn:
    """The ROC curves of one attack."""

    attack: str
    looked_at: str
    others: int
    charts: dict[str, Markup]  # by the width of the page


def metrics() -> list[Metric]:
    """The columns of the table."""
    return [METRICS[name] for name in CHANCE]


def tellers(result: Result) -> list[Teller]:
    """Everyone who told members from others: over all rounds first, then round by round."""
    roles, called = list(ROLES), words(result)
    rows = [row for row in result.rows if row.question == "member"]
    return [
        Teller(
            row=row,
            who=called[row.role].who,
            looked_at=_looked_at(row),
            pairs=formatting.percent(row.metrics.get(AUC)),
            bar=interval_bar(row.metrics.get(AUC), row.role, CHANCE[AUC], row.bounds.get(AUC)),
            cells=[_cell(row, metric) for metric in metrics()],
            allowed=formal_bound(row),
        )
        for row in sorted(rows, key=lambda row: (row.round or 0, row.of_model, row.attack, roles.index(row.role)))
    ]


def drawn(result: Result) -> list[Drawn]:
    """The ROC curves of every attack over all rounds: of updates, then of the trained model."""
    rows = [row for row in result.rows if row.question == "member" and row.round is None and row.curve is not None]
    found = []
    for attack in dict.fromkeys(row.attack for row in sorted(rows, key=lambda row: row.of_model)):
        own = [row for row in rows if row.attack == attack]
        others = min(row.curve.others for row in own if row.curve)
        found.append(Drawn(attack, _looked_at(own[0]), others, _charts(result, own, others)))
    return found


def _looked_at(row: Row) -> str:
    return "the trained model" if row.of_model else "single updates"


def _cell(row: Row, metric: Metric) -> tuple[str, str]:
    estimate = row.metrics.get(metric.name)
    if estimate is None:
        return "not measured", ""
    factor = 100 if metric.share else 1
    mean = formatting.number(factor * estimate.mean, metric.digits)
    return mean, formatting.interval(estimate, factor, metric.digits)


def _charts(result: Result, rows: Sequence[Row], others: int) -> dict[str, Markup]:
    called, roles = words(result), list(ROLES)
    # From the smallest rate that so many others can tell, in equal steps of the logarithmic axis.
    rates = [(1 / others) ** (1 - step / (_POINTS - 1)) for step in range(_POINTS)]
    across = [100 * rate for rate in rates]
    lines = [
        Series(called[row.role].label, across, [found_at(row.curve, rate) for rate in rates], style=row.role)
        for row in sorted(rows, key=lambda row: roles.index(row.role))
        if row.curve is not None and row.role != "noise-floor"
    ]
    lines.append(Series("chance", across, rates, style="noise-floor"))
    return {
        name: line_chart(
            lines,
            x=Axis("False alarms: % of the others taken for members", log=True),
            y=Axis("Members found (↓ more private)", percent=True),
            title=f"Members that {rows[0].attack} finds against the false alarms that it raises",
            width=width,
        )
        for name, width in WIDTHS.items()
    }


def found_at(curve: Roc, rate: float) -> float:
    """The share of members found with at most this rate of false alarms.

    >>> found_at(Roc(false_alarms=[0.0, 0.1, 1.0], found=[0.4, 0.8, 1.0], others=10), 0.5)
    0.8
    """
    place = bisect.bisect_right(curve.false_alarms, rate * (1 + 1e-9)) - 1
    return curve.found[place] if place >= 0 else 0.0
