"""The progress bar, on a terminal and off it."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from fedveil.federation.observers import Observer
from fedveil.federation.progress import ProgressBar
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.progress import Meter, Style

from .small import small_task

SETTINGS = FederationSettings(rounds=3, batch_size=4)


def shown(style: Style) -> str:
    out = io.StringIO()
    with Meter(style, out) as meter:
        meter.stage("digits")
        bar = ProgressBar(meter, "digits")
        federate(small_task(norm=False), None, SETTINGS, backend="stacked", observers=[bar])
    return out.getvalue()


def test_one_line_per_round_off_a_terminal() -> None:
    lines = shown("lines").splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("digits: round 2/3, loss ")
    assert "accuracy" in lines[3]
    assert not shown("none")


def test_a_bar_on_a_terminal() -> None:
    assert "3/3" in shown("bar")


def test_the_bar_is_taken_away_after_an_error() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Breaks(Observer):
        def on_round_start(self, number: int, clients: list[int]) -> None:
            if number == 2:
                raise ValueError("on purpose")

    with redirect_stderr(Terminal()) as terminal, pytest.raises(ValueError, match="on purpose"):
        federate(small_task(norm=False), None, SETTINGS, backend="stacked", observers=[Breaks()])
    assert terminal.getvalue().endswith("\n")
    assert "round 1/3" in terminal.getvalue()
