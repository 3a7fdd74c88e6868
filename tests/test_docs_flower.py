"""docs/flower.md is true: its app trains protected, its captures can be attacked, its commands exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fedveil.cli.main import run
from fedveil.federation.capture import Capture
from flower.conftest import in_a_task
from flower.grids import FakeGrid
from pages import ROOT, assert_links_lead_to_files, blocks

TEXT = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
CODE = blocks(TEXT, "python")


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    in_a_task(monkeypatch)
    monkeypatch.chdir(tmp_path)
    named: dict[str, Any] = {}
    for block in CODE:
        exec(compile(block, "flower.md", "exec"), named)
    return named


def grid_of(app: Any, settings: dict[str, Any] | None = None) -> FakeGrid:
    grid = FakeGrid(dict.fromkeys(range(4), app), settings)
    for held in grid.contexts.values():
        held.node_config["num-partitions"] = 4
    return grid


def test_the_tutorial_ends_in_a_protected_and_audited_federation(
    scope: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = grid_of(scope["app"])
    scope["server_app"](grid, grid.contexts[0])
    told = [json.loads(line) for line in (tmp_path / "out/rounds.jsonl").read_text().splitlines()]
    assert [line["taken"] for line in told] == [[0, 1, 2, 3]] * 2
    assert all(line["metrics"] == {} for line in told), "the training loss stays with the client"
    assert "Formal guarantee: none" in capsys.readouterr().out
    (capture,) = (tmp_path / "out/captures").iterdir()
    seen = Capture.load(capture)
    assert seen.kind == "delta"
    length = sum(tensor.square().sum().item() for tensor in seen.shared.values()) ** 0.5
    assert length == pytest.approx(0.56, abs=0.05), "clipped to 0.5, and noise on 650 numbers"
    (tmp_path / "app.py").write_text(CODE[0])
    command = next(line for line in _commands() if line.startswith("fedveil attack"))
    quick = ["--attack", "inverting-gradients:steps=3", "--no-link", "--workers", "1", "--backend", "loop"]
    quick += ["--store", "none", "--out", "attacked", "--quiet"]
    assert run([*shlex.split(command)[1:], *quick]) == 0


def test_training_under_guard_sends_what_the_mod_may_let_out(scope: dict[str, Any]) -> None:
    from fedveil.flower import Server, ServerSettings

    grid = grid_of(scope["guarded_app"], {"defense": "gradient-dropout+spm:epsilon=9"})
    outcome = Server(ServerSettings(rounds=1)).start(grid, scope["new_model"]().state_dict())
    assert outcome.history[0].taken == [0, 1, 2, 3]


def _commands() -> list[str]:
    return [line for block in blocks(TEXT, "console") for line in block.splitlines()]


def test_its_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("fedveil.flower.federate.run_task", lambda run, where, told: given.append(run) or _outcome())
    for command in _commands():
        if command.startswith("fedveil federate"):
            assert run(shlex.split(command)[1:]) == 0, command
    assert [each.noise for each in given] == ["seeded", "secure"]
    for each in given:
        each.check()


def _outcome() -> dict[str, Any]:
    return {"guarantee": {"sentence": ""}}


def test_the_table_of_options_names_what_protect_takes() -> None:
    from inspect import signature

    from fedveil.flower.protect import protect

    told = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))
    assert signature(protect).parameters.keys() - {"defense", "digits"} <= told


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")
