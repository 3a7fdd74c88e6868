"""The progress bar, on a terminal and off it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedveil.errors import FedveilError
from fedveil.federation.progress import ProgressBar
from fedveil.federation.run import federate
from fedveil.federation.settings import Federation

from .small import Broken, small_task

SETTINGS = Federation(rounds=3, batch_size=4)


def shown(*, terminal: bool, lines: bool = True, defense: object = None) -> str:
    out = io.StringIO()
    bar = ProgressBar("digits", console=Console(file=out, force_terminal=terminal, width=100), lines=lines)
    try:
        federate(small_task(norm=False), defense, SETTINGS, backend="stacked", observers=[bar])  # type: ignore[arg-type]
    finally:
        assert bar._bar is None
    return out.getvalue()


def test_one_line_per_round_off_a_terminal() -> None:
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("digits: round 2/3, loss ")
    assert "accuracy" in lines[2]
    assert not shown(terminal=False, lines=False)


def test_a_bar_on_a_terminal() -> None:
    assert "3/3" in shown(terminal=True)


def test_the_bar_is_taken_away_after_an_error() -> None:
    with pytest.raises(FedveilError, match="not finite"):
        shown(terminal=True, defense=Broken())
