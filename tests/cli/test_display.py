"""What a run shows: a resumed one only once nothing can be refused any more."""

from __future__ import annotations

import pytest

from fedveil.cli.display import Display


def test_a_resumed_run_holds_its_first_stage_back(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(resumes=True)
    watch = display.watch()
    assert watch.stage is not None
    assert watch.attack is not None
    watch.stage("attacking with dlg")
    assert capsys.readouterr().err == ""
    watch.attack(1, 10)
    watch.attack(2, 10)
    assert capsys.readouterr().err == "attacking with dlg …\n"
    watch.stage("judging")
    assert capsys.readouterr().err == "judging …\n"


def test_a_quiet_one_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with (display := Display(quiet=True)).running():
        display.stage("training")
        display.stage("judging")
    assert capsys.readouterr() == ("", "")
