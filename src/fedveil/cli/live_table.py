"""The table of a study while it is run: on a terminal it fills up below the lines on what is done."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from fedveil.progress import is_terminal

if TYPE_CHECKING:
    from fedveil.auditing.audit_result import AuditResult
    from fedveil.study.rooms import IndexedStore
    from fedveil.study.running import Cell
    from fedveil.study.studying import StudyPlan

LEAST_LINES = 12  # of a terminal, below which lines alone are shown


@dataclass
class LiveTable:
    """Told of every audit that is there; passes it on to `counter`, which writes a line, and draws the table below."""

    plan: StudyPlan
    store: IndexedStore
    counter: Callable[[Cell, float], None]
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    _audits: dict[str, AuditResult] = field(default_factory=dict)
    _drawn: int = 0  # lines

    def __call__(self, cell: Cell, seconds: float) -> None:
        from fedveil.study.rooms import kept_result

        self.clear()
        self.counter(cell, seconds)
        found = kept_result(self.store, cell.experiment)
        if found is not None:
            self._audits[cell.name] = found
        lines = self._lines()
        print(*lines, sep="\n", end="\n" if lines else "", file=self.stream, flush=True)
        self._drawn = len(lines)

    def clear(self) -> None:
        """Take the table away, so that what is written next stands in its place."""
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}F\x1b[J")
            self.stream.flush()
        self._drawn = 0

    def _lines(self) -> list[str]:
        """The table as far as it fits, cut at the terminal's right edge: a line that wraps could not be taken away."""
        from fedveil.study.outcome import outcome_of
        from fedveil.study.tables import as_text

        width, height = shutil.get_terminal_size()
        if height < LEAST_LINES:
            return []
        table = outcome_of(self.plan.scaled, self._audits, self.plan.missing).table()
        lines = ["", *as_text(table).splitlines()[: -len(table.notes) or None]]
        return [line[: width - 1] for line in lines[: height - 3]]


def live(
    plan: StudyPlan, store: IndexedStore, counter: Callable[[Cell, float], None], *, quiet: bool
) -> LiveTable | None:
    """A live table where there is somebody to see it; of a leaderboard, which has hundreds of rows, none."""
    if quiet or plan.scaled.study.every or not is_terminal(sys.stderr):
        return None
    return LiveTable(plan, store, counter)
