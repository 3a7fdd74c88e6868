"""The page of a study: the table with the published numbers, and what it says."""

from __future__ import annotations

from pathlib import Path

from fedveil.files import write_atomically
from fedveil.report.environment import environment
from fedveil.study.outcome import Outcome
from fedveil.study.summary import summary


def render_study(outcome: Outcome) -> str:
    """The page as one HTML document without scripts. All text is escaped."""
    return (
        environment().get_template("study.html").render(outcome=outcome, table=outcome.table(), told=summary(outcome))
    )


def write_study(outcome: Outcome, path: Path) -> None:
    """Write the page, whole or not at all."""
    write_atomically(path, render_study(outcome).encode())
