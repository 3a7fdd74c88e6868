"""docs/compare.md is true: its code runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import ROOT, assert_links_lead_to_files, blocks

PAGE = ROOT / "docs" / "compare.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(TEXT, "python")
    exec(compile(code, "compare.md", "exec"), {})
    assert "no defense (ceiling)" in capsys.readouterr().out
    assert (tmp_path / "frontier.html").is_file()


def test_the_links_lead_somewhere() -> None:
    assert_links_lead_to_files(TEXT, PAGE.parent)
