"""docs/captures.md is true: its code and its commands run, and come to what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.auditing.audit_result import AuditResult
from pages import ROOT, assert_links_lead_to_files, assert_runs, blocks

TEXT = (ROOT / "docs" / "captures.md").read_text(encoding="utf-8")


def test_the_code_runs_and_comes_to_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = blocks(TEXT, "python"), blocks(TEXT, "text")
    assert (len(code), len(said)) == (3, 2)
    scope: dict[str, Any] = {}
    printed, roles = [], []
    for block in code:
        exec(compile(block, "captures.md", "exec"), scope)
        printed.append(capsys.readouterr().out)
        result = scope["result"]
        assert isinstance(result, AuditResult)
        roles.append([row.role for row in result.result.rows if row.question == "link"])
    assert said[0].strip() in printed[0]
    assert said[1] == printed[2]
    assert (tmp_path / "report.html").is_file()
    assert roles == [["naive", "noise-floor"], ["naive", "adaptive", "noise-floor"], ["naive", "noise-floor"]]


def test_the_commands_run(tmp_path: Path) -> None:
    for command in blocks(TEXT, "sh")[0].strip().splitlines():
        assert_runs(command, tmp_path)
    assert (tmp_path / "fedveil-out/attacked/report.html").is_file()


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")
