"""Tables as text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "≤": r"$\leq$",
    "τ": r"$\tau$",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "\u00a0": "~",
}


@dataclass(frozen=True)
class Table:
    """Cells of text under heads. The first `words` columns are words, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    notes: Sequence[str] = ()
    groups: Mapping[int, str] = field(default_factory=dict)  # a line before the row of this number


def as_text(table: Table) -> str:
    """For a terminal.

    >>> print(as_text(Table("", ["a", "n"], [["x", "1"], ["yy", "22"]])))
    a    n
    x    1
    yy  22
    """
    cells = [list(table.heads), *map(list, table.rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(table.heads))]
    lines = []
    for number, row in enumerate(cells):
        if number - 1 in table.groups:
            lines.append(table.groups[number - 1])
        adjusted = [
            cell.ljust(width) if place < table.words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(adjusted).rstrip())
    return "\n".join([*([table.title, ""] if table.title else []), *lines, *table.notes])


def as_markdown(table: Table) -> str:
    """For a page.

    >>> print(as_markdown(Table("", ["a|b", "n"], [["x", "1"]])), end="")
    | a\\|b | n |
    |:---|---:|
    | x | 1 |
    """
    rule = "|".join(":---" if place < table.words else "---:" for place in range(len(table.heads)))
    lines = [_piped(table.heads), f"|{rule}|"]
    for number, row in enumerate(table.rows):
        if number in table.groups:
            lines.append(_piped([f"**{table.groups[number]}**", *[""] * (len(table.heads) - 1)]))
        lines.append(_piped(row))
    head = [f"### {table.title}", ""] if table.title else []
    notes = [f"\n{note}" for note in table.notes if note]  # a paragraph each
    return "\n".join([*head, *lines, *notes]) + "\n"


def as_latex(table: Table) -> str:
    """For a paper; needs the package booktabs.

    >>> print(as_latex(Table("", ["a", "n"], [["x_1", "1 %"]])), end="")
    \\begin{tabular}{lr}
    \\toprule
    a & n \\\\
    \\midrule
    x\\_1 & 1 \\% \\\\
    \\bottomrule
    \\end{tabular}
    """
    columns = "".join("l" if place < table.words else "r" for place in range(len(table.heads)))
    lines = [f"% {table.title}"] if table.title else []
    lines += [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", _joined(table.heads), r"\midrule"]
    for number, row in enumerate(table.rows):
        if number in table.groups:
            lines.append(f"\\multicolumn{{{len(table.heads)}}}{{l}}{{\\emph{{{latex(table.groups[number])}}}}} \\\\")
        lines.append(_joined(row))
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Records with the same keys, as a file with a head."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def latex(text: str) -> str:
    """Text with all that LaTeX takes for commands escaped."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _piped(cells: Sequence[str]) -> str:
    return "| " + " | ".join(re.sub(r"([|\\])", r"\\\1", cell).replace("\n", " ") for cell in cells) + " |"


def _joined(cells: Sequence[str]) -> str:
    return " & ".join(map(latex, cells)) + r" \\"
