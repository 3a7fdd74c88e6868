"""Bars with the time left where someone watches, lines where they are asked for, nothing elsewhere."""

from __future__ import annotations

import io
import os
import pty
import sys
import types
from contextlib import redirect_stderr

import pytest

import fedveil as fv
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.federation.observers import Observer, Watch
from fedveil.progress import Forecast, Meter, Stage, part_of, reporting, style_for

TRAINING, AGAIN, ATTACK = Stage("training", "t", 10), Stage("training under x", "t", 20), Stage("attacking", "a", 500)


class Terminal(io.StringIO):
    """Someone watches this one."""

    def isatty(self) -> bool:
        return True


def notebook(monkeypatch: pytest.MonkeyPatch, config: dict[str, object]) -> None:
    shell = types.SimpleNamespace(config=config)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))


def test_it_is_shown_where_someone_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in (
        (Terminal(), "bar bar none"),
        (io.StringIO(), "none lines none"),
        (None, "none lines none"),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        assert [style_for(progress) for progress in (None, True, False)] == expected.split()
    notebook(monkeypatch, {"IPKernelApp": {}})
    assert [style_for(progress) for progress in (None, True, False)] == ["bar", "bar", "none"]
    notebook(monkeypatch, {})  # IPython in a pipe
    assert style_for(None) == "none"


def test_the_time_left_covers_the_stages_ahead_as_far_as_known() -> None:
    now = [0.0]
    forecast = Forecast(lambda: now[0])
    forecast.plan([TRAINING, AGAIN, ATTACK])
    forecast.start("training")
    assert forecast.left(0.0) is None
    now[0] = 30.0
    assert forecast.left(0.5) == (30 + 120, False)  # twice the work under the defense; of attacks nothing is known
    forecast.start("training under x")
    forecast.left(0.0)
    now[0] = 70.0
    assert forecast.left(0.25) == (120, False)
    forecast.start("attacking")
    forecast.left(0.0)
    now[0] = 80.0
    assert forecast.left(0.1) == (pytest.approx(90), True)


def test_a_resumed_stage_is_timed_from_where_it_goes_on() -> None:
    now = [0.0]
    forecast = Forecast(lambda: now[0])
    forecast.start("training")
    assert forecast.left(0.8) is None
    now[0] = 10.0
    assert forecast.left(0.9) == (pytest.approx(10), True)


def test_a_bar_shows_the_stage_the_note_and_the_time_left() -> None:
    now, stream = [0.0], io.StringIO()
    with Meter("bar", stream, lambda: now[0]) as meter:
        meter.plan([TRAINING, ATTACK])
        meter.stage("training")
        meter.update(0, 10)
        now[0] = 75.0
        meter.update(5, 10, "round 5/10")
        meter._bar.refresh()
        meter.say("by the way")
        meter.stage("judging")
    shown = stream.getvalue()
    assert "training:  50%|" in shown
    assert "round 5/10, over 1:15 left" in shown
    assert "by the way\n" in shown
    kept = [line.rpartition("\r")[2] for line in shown.split("\n")]
    assert not any("left" in line or "judging: " in line for line in kept)  # what stays on the screen


def test_a_part_is_told_as_that_of_the_whole() -> None:
    told: list[tuple[int, int]] = []
    report = part_of(lambda done, total: told.append((done, total)), 0.5, 0.75)
    report(1, 4)
    report(4, 4)
    assert told == [(562, 1000), (750, 1000)]


def task() -> fv.Task:
    return fv.task("digits", model="mlp:hidden=[8]", clients=2, limit=40)


def audit(**options: object) -> None:
    fv.audit(
        task(),
        "gradient-dropout",
        InvertingGradients(steps=4, restarts=1),
        federation=fv.FederationSettings(rounds=2),
        settings=fv.AuditSettings(victims=2, candidates=5, reference="none", rounds=(1, 2), link=False),
        **options,  # type: ignore[arg-type]
    )


def test_python_shows_progress_on_a_terminal() -> None:
    with redirect_stderr(Terminal()) as terminal:
        audit()
    shown = terminal.getvalue()
    for words in ("training without a defense: ", "training under gradient-dropout: ", "round 2/2, accuracy"):
        assert words in shown
    assert "attacking with inverting-gradients: 100%" in shown
    assert shown.count("\n") == 3  # one bar for each stage stays


def test_python_is_silent_elsewhere_or_if_told(capfd: pytest.CaptureFixture[str]) -> None:
    with redirect_stderr(Terminal()) as terminal:
        audit(progress=False)
    assert terminal.getvalue() == ""
    audit()
    fv.federate(task(), None, fv.FederationSettings(rounds=1))
    assert capfd.readouterr() == ("", "")
    fv.federate(task(), None, fv.FederationSettings(rounds=1), progress=True)
    assert capfd.readouterr().err.splitlines()[0] == "training …"


def test_federate_and_attacks_show_it_too() -> None:
    with redirect_stderr(Terminal()) as terminal:
        fv.federate(task(), "clip", fv.FederationSettings(rounds=2))
        with reporting(None, "attacking with dlg") as report:
            report(7, 7)
    assert "attacking with dlg: 100%" in terminal.getvalue()
    assert "training under clip: 100%" in terminal.getvalue()
    assert "round 2/2" in terminal.getvalue()


def test_a_watch_of_ones_own_takes_the_place_of_the_bars() -> None:
    lines: list[str] = []
    plans: list[list[str]] = []
    steps: list[float] = []
    rounds: list[int] = []

    class Mine(Observer):
        def on_round_end(self, record: object) -> None:
            rounds.append(record.round)  # type: ignore[attr-defined]

    watch = Watch(
        observers=(Mine(),),
        plan=lambda stages: plans.append([stage.line for stage in stages]),
        stage=lines.append,
        attack=lambda done, total: steps.append(done / total),
    )
    with redirect_stderr(Terminal()) as terminal:
        audit(watch=watch)
    assert terminal.getvalue() == ""
    assert plans == [lines[:-1]]
    assert lines[-1] == "judging"
    assert rounds == [1, 2, 1, 2]
    assert steps == sorted(steps)
    assert steps[-1] == 1.0
    with redirect_stderr(Terminal()) as terminal:
        audit(watch=watch, progress=True)
    assert len(rounds) == 8
    assert "training" in terminal.getvalue()


def test_a_terminal_that_does_not_know_its_size() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, Meter("bar", stream) as meter:
        meter.stage("training")
        meter.update(1, 2)
    assert b"training:  50%" in os.read(ours, 10_000)
    os.close(ours)
