"""The rows of a result as text that fits a width, as HTML for a notebook, and as records for other programs."""

from __future__ import annotations

import csv
import html
import io
from itertools import groupby
from typing import Any

from fedveil.auditing.result import Estimate, Row
from fedveil.leakage.catalog import METRICS

ROLE_TITLES = {
    "ceiling": "undefended (ceiling)",
    "naive": "defended, naive attacker",
    "adaptive": "defended, adaptive attacker",
    "noise-floor": "floor: noise for the update",
    "mean-floor": "floor: the mean image",
    "bound": "the perturbed input",
}
SHOWN = ("identified", "psnr", "ssim", "mse")
FIELDS = ("attack", "role", "round", "metric", "mean", "low", "high", "count")


def as_text(rows: list[Row], width: int, blocks: int | None = None) -> str:
    """The rows, by attack; columns that do not fit beside each other follow below (or not: at most `blocks` of them).

    A star marks the strongest attacker.
    """
    shown = _shown(rows)
    titles = [_title(row) for row in rows]
    widest = max(map(len, titles), default=0)
    columns = [[METRICS[name].column, *(_cell(row.metrics.get(name), name) for row in rows)] for name in shown]
    texts = [_block(rows, titles, part) for part in _fitting(columns, width - widest)]
    return "\n\n".join(texts[:blocks])


def _fitting(columns: list[list[str]], room: int) -> list[list[list[str]]]:
    """The columns in groups that fit; at least one in each."""
    found: list[list[list[str]]] = [[]]
    left = room
    for column in columns:
        needed = 2 + max(map(len, column))
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


def as_html(rows: list[Row]) -> str:
    """The same as a table of HTML."""
    shown = _shown(rows)
    head = "".join(f"<th>{html.escape(METRICS[name].column)}</th>" for name in shown)
    body = ""
    for heading, members in groupby(rows, key=_heading):
        body += f'<tr><th colspan="{len(shown) + 1}" style="text-align:left">{html.escape(heading)}</th></tr>'
        for row in members:
            cells = "".join(f"<td>{html.escape(_cell(row.metrics.get(name), name))}</td>" for name in shown)
            body += f'<tr><td style="text-align:left">{html.escape(_title(row).strip())}</td>{cells}</tr>'
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def as_records(rows: list[Row]) -> list[dict[str, Any]]:
    """One record for each attack, role, round and metric; where all attacked rounds are taken together, no round."""
    return [
        {"attack": row.attack, "role": row.role, "round": row.round, "metric": name, **found.model_dump()}
        for row in rows
        for name, found in row.metrics.items()
    ]


def as_csv(rows: list[Row]) -> str:
    """The records as a file with a head."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_records(rows))
    return text.getvalue()


def _shown(rows: list[Row]) -> list[str]:
    return [name for name in SHOWN if any(name in row.metrics for row in rows)]


def _heading(row: Row) -> str:
    attack = row.attack or "no attack"
    return attack if row.round is None else f"{attack}, round {row.round}"


def _title(row: Row) -> str:
    return f"  {ROLE_TITLES[row.role]}{' *' if row.strongest else ''}"


def _cell(estimate: Estimate | None, name: str) -> str:
    if estimate is None:
        return "–"
    metric = METRICS[name]
    factor = 100 if metric.share else 1
    low, high = (f"{factor * value:.{metric.digits}f}" for value in (estimate.low, estimate.high))
    return f"{metric.format(estimate.mean)} [{low}, {high}]"
