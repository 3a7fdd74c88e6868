"""The page of a study: the table with the published numbers, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedveil.files import write_atomically
from fedveil.report.environment import environment
from fedveil.report.study_charts import shown
from fedveil.study.figures import Drawing
from fedveil.study.outcome import Outcome
from fedveil.study.summary import summary


def render_study(outcome: Outcome, drawings: Sequence[Drawing] = ()) -> str:
    """The page as one HTML document without scripts. All text is escaped."""
    page = environment().get_template("study.html")
    figures = [shown(drawing) for drawing in drawings]
    return page.render(outcome=outcome, table=outcome.table(), told=summary(outcome), figures=figures)


def write_study(outcome: Outcome, path: Path, drawings: Sequence[Drawing] = ()) -> None:
    """Write the page, whole or not at all."""
    write_atomically(path, render_study(outcome, drawings).encode())
