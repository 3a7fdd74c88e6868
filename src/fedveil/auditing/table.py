"""The rows of a result as text that fits a width, as HTML for a notebook, and as records for other programs."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fedveil.auditing.result import Estimate, Row
from fedveil.auditing.roles import ATTACKERS, wording
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.membership import CHANCE, RATES
from fedveil.leakage.modality import LINKED, Modality

FIELDS = ("attack", "role", "round", "metric", "mean", "low", "high", "count", "bound", "attacker_has")
HAS = "attacker has"


@dataclass(frozen=True)
class Column:
    """A column: its head, and what it says of a row."""

    head: str
    cell: Callable[[Row], str]


@dataclass(frozen=True)
class Part:
    """The rows that answer one question, with what each is called and the columns that go with it."""

    rows: list[Row]
    titles: list[str]
    columns: list[Column]


def parts(rows: Sequence[Row], modality: Modality) -> Iterator[Part]:
    """The rows question by question."""
    words = wording((row.role for row in rows), modality.words)
    shown = {"reconstruct": modality.shown, "link": (LINKED,), "member": tuple(CHANCE)}
    for question, names in shown.items():
        asked = [row for row in rows if row.question == question]
        measured = dict.fromkeys(name for row in asked for name in row.metrics)
        # Without the truth only the matching cost is known.
        columns = [_measured(name) for name in [each for each in names if each in measured] or measured]
        if question == "member":  # what was not measured is told, too
            columns = [_measured(name) for name in names]
        if question != "reconstruct":
            columns.append(Column("formal bound", formal_bound))
        if any(row.threat for row in asked):
            columns.append(Column(HAS, attacker_has))
        if asked:
            yield Part(asked, [f"{words[row.role].title}{' *' if row.strongest else ''}" for row in asked], columns)


def _measured(name: str) -> Column:
    missing = "not measured" if name in CHANCE else "–"
    return Column(METRICS[name].column, lambda row: _cell(row.metrics.get(name), name, missing))


def attacker_has(row: Row, *, whole: bool = False) -> str:
    """What stands behind a row beside the update; `whole`: with how much of it there is.

    >>> from fedveil.attacks.threat import ThreatModel
    >>> row = Row(attack="a", role="naive", metrics={}, values={}, threat=ThreatModel(has=("labels", "candidates (9)")))
    >>> attacker_has(row), attacker_has(row, whole=True)
    ('labels, candidates', 'labels, candidates (9)')
    """
    if row.threat is None:
        return "–"
    return row.threat.words if whole else re.sub(r" \([^)]*\)", "", row.threat.words)


def formal_bound(row: Row) -> str:
    """How often any attacker at all may link an update, as far as a guarantee says so; rounded up.

    >>> formal_bound(Row(attack="link", role="adaptive", question="link", metrics={}, values={}, bound=0.3612))
    '≤ 37 %'
    """
    if row.role not in ATTACKERS:
        return "–"
    if row.question == "member":
        told = [_allowed(name, row.bounds[name]) for name in row.metrics if name in row.bounds]
        return ", ".join(told) or "no formal bound"
    return "no formal bound" if row.bound is None else f"≤ {rounded_up(row.bound)} %"


def _allowed(name: str, bound: float) -> str:
    """The most that a guarantee leaves of one measure of membership.

    >>> _allowed("member_auc", 0.7613), _allowed("member_tpr_1", 0.0272)
    ('AUC ≤ 0.77', '≤ 3 % at 1 %')
    """
    if name not in RATES:
        return f"AUC ≤ {rounded_up(bound) / 100:.2f}"
    return f"≤ {rounded_up(bound)} % at {100 * RATES[name]:g} %"


def rounded_up(bound: float) -> int:
    """A bound on a share in whole percent: less than was proven must not be stated.

    >>> rounded_up(0.3612), rounded_up(0.07), rounded_up(0.995)
    (37, 7, 100)
    """
    return math.ceil(100 * bound - 1e-9)  # 100 · 0.07 is a little more than 7


def as_text(rows: Sequence[Row], modality: Modality, width: int, blocks: int | None = None) -> str:
    """The rows, by question and attack; columns that do not fit beside each other follow below.

    blocks: how many of these blocks to show at most of each question.
    A star marks the strongest attacker.
    """
    texts: list[str] = []
    for part in parts(rows, modality):
        titles = [f"  {title}" for title in part.titles]
        columns = [[column.head, *map(column.cell, part.rows)] for column in part.columns]
        fitting = _fitting(columns, width - max(map(len, titles)))
        texts += [_block(part.rows, titles, some) for some in fitting[:blocks]]
    return "\n\n".join(texts)


def _fitting(columns: list[list[str]], room: int) -> list[list[list[str]]]:
    """The columns in groups that fit; at least one in each."""
    found: list[list[list[str]]] = [[]]
    left = room
    for column in columns:
        needed = 2 + max(map(len, column))
        if column[0] == HAS and needed > room:
            continue  # words that no line has room for: reports and records have them
        if found[-1] and needed > left:
            found.append([])
            left = room
        found[-1].append(column)
        left -= needed
    return found


def _block(rows: list[Row], titles: list[str], columns: list[list[str]]) -> str:
    lines = [["", *(column[0] for column in columns)]]
    for heading, members in groupby(enumerate(rows), key=lambda each: _heading(each[1])):
        lines.append([heading])
        lines += [[titles[place], *(column[place + 1] for column in columns)] for place, _ in members]
    widths = [max(map(len, titles), default=0), *(max(map(len, column)) for column in columns)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=False)).rstrip() for line in lines)


def as_html(rows: Sequence[Row], modality: Modality) -> str:
    """The same as tables of HTML."""
    return "".join(map(_html, parts(rows, modality)))


def _html(part: Part) -> str:
    head = "".join(f"<th>{html.escape(column.head)}</th>" for column in part.columns)
    body = ""
    for heading, members in groupby(zip(part.rows, part.titles, strict=True), key=lambda each: _heading(each[0])):
        body += f'<tr><th colspan="{len(part.columns) + 1}" style="text-align:left">{html.escape(heading)}</th></tr>'
        for row, title in members:
            cells = "".join(f"<td>{html.escape(column.cell(row))}</td>" for column in part.columns)
            body += f'<tr><td style="text-align:left">{html.escape(title)}</td>{cells}</tr>'
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def as_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One record for each attack, role, round and metric; where all attacked rounds are taken together, no round."""
    return [
        {
            "attack": row.attack,
            "role": row.role,
            "round": row.round,
            "metric": name,
            **found.model_dump(),
            "bound": row.allowed(name),
            "attacker_has": None if row.threat is None else row.threat.words,
        }
        for row in rows
        for name, found in row.metrics.items()
    ]


def as_csv(rows: Sequence[Row]) -> str:
    """The records as a file with a head."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_records(rows))
    return text.getvalue()


def _heading(row: Row) -> str:
    attack = row.attack or "no attack"
    return attack if row.round is None else f"{attack}, round {row.round}"


def _cell(estimate: Estimate | None, name: str, missing: str) -> str:
    if estimate is None:
        return missing
    metric = METRICS[name]
    factor = 100 if metric.share else 1
    low, high = (f"{factor * value:.{metric.digits}f}" for value in (estimate.low, estimate.high))
    return f"{metric.format(estimate.mean)} [{low}, {high}]"
