"""docs/canaries.md is true: its commands and its code run, and what it quotes is what is said."""

from __future__ import annotations

from typing import Any

import pytest

from fedveil.cli.main import run
from pages import ROOT, assert_links_lead_to_files, blocks

TEXT = (ROOT / "docs" / "canaries.md").read_text(encoding="utf-8")


def test_commands_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    for command in blocks(TEXT, "sh")[0].splitlines():
        assert run(command.split()[1:]) == 0
        said.append(capsys.readouterr().out)
    assert said[0].splitlines()[0] in TEXT.replace("\n", " ")
    assert (tmp_path / "canary.json").exists()


def test_the_code_runs() -> None:
    scope: dict[str, Any] = {}
    for block in blocks(TEXT, "python"):
        exec(compile(block, "canaries.md", "exec"), scope)
    assert not scope["found"].broken


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")
