"""`fedveil canary`: the sentence, the JSON, and an exit code for a broken promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.defenses.dp_gaussian import DPGaussian
from journeys.console import Fedveil, refused

QUICK = ("canary", "--defense", "dp-gaussian:epsilon=1", "--canaries", "300")


def test_a_promise_that_holds(fedveil: Fedveil, tmp_path: Path) -> None:
    said = fedveil(*QUICK, "--fail-if", "broken", "--out", "found.json")
    assert said.code == 0
    assert "with 95 % confidence; promised ε = " in said.out
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert json.loads(fedveil(*QUICK, "--json").out) == found
    assert found["broken"] is False
    assert found["sentence"] in said.out


def test_a_promise_that_does_not(fedveil: Fedveil, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DPGaussian, "sigma", 0.1)
    said = fedveil(*QUICK, "--fail-if", "broken")
    assert said.code == 3
    assert said.out.startswith("BROKEN: ")
    assert fedveil(*QUICK).code == 0


def test_wrong_options_get_one_line(fedveil: Fedveil) -> None:
    refused(fedveil(*QUICK, "--fail-if", "exposed"), "--fail-if must be broken")
    refused(fedveil(*QUICK, "--out", "nowhere/found.json"), "--out must be a file")
    refused(fedveil("canary", "--defense", "spm"), "mechanisms that clip and add noise")
