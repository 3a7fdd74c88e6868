"""Tables with a header line and values separated by commas, semicolons or tabs: CSV. UTF-8, plain or gzipped."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedveil.errors import FedveilError, one_line, printable, shortened
from fedveil.tasks.formats.lines import read_text

MOST_COLUMNS = 10_000
SEPARATORS = (",", ";", "\t")


@dataclass(frozen=True, eq=False)
class CsvTable:
    """The values of a file as texts, without the spaces around them."""

    path: Path
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]  # where each row stands in the file

    def column(self, name: str) -> list[str]:
        """The values of one column."""
        place = self._places[name]
        return [row[place] for row in self.rows]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.header)}

    def without(self, dropped: set[int]) -> CsvTable:
        """The same without some rows."""
        kept = [place for place in range(len(self.rows)) if place not in dropped]
        rows, lines = tuple(self.rows[place] for place in kept), tuple(self.lines[place] for place in kept)
        return CsvTable(self.path, self.header, rows, lines)


def read_csv(path: Path) -> CsvTable:
    """Read a file whose first line names the columns. The separator is whichever its first line has most of."""
    text = read_text(path)
    first = text.partition("\n")[0]
    separator = max(SEPARATORS, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[tuple[str, ...]] = []
    lines: list[int] = []
    try:
        header = tuple(printable(name.strip()) for name in next(reader, []))
        _check_header(path, header)
        for row in reader:
            if not row:
                continue  # an empty line, as at the end of many files
            if len(row) != len(header):
                values = f"{len(row)} value{'s' * (len(row) != 1)}"
                raise FedveilError(f"{path}: line {reader.line_num} has {values}, and the header names {len(header)}")
            rows.append(tuple(value.strip() for value in row))
            lines.append(reader.line_num)
    except csv.Error as error:
        raise FedveilError(f"{path}: line {reader.line_num} cannot be read: {one_line(error)}") from None
    if not rows:
        raise FedveilError(f"{path}: has a header and no rows")
    return CsvTable(path, header, tuple(rows), tuple(lines))


def _check_header(path: Path, header: tuple[str, ...]) -> None:
    if not all(header) or not header:
        raise FedveilError(f"{path}: the first line must name every column, and a name is missing")
    if len(header) > MOST_COLUMNS:
        raise FedveilError(f"{path}: names {len(header):,} columns, at most {MOST_COLUMNS:,} can be read")
    name, times = Counter(header).most_common(1)[0]
    if times > 1:
        raise FedveilError(f"{path}: {times} columns are named '{shortened(name, 40)}'")
