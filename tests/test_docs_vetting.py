"""docs/vetting.md is true: its code runs, and comes to what it says."""

from __future__ import annotations

from typing import Any

import pytest

from pages import ROOT, assert_links_lead_to_files, blocks

TEXT = (ROOT / "docs" / "vetting.md").read_text(encoding="utf-8")


def test_the_code_runs_and_comes_to_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = blocks(TEXT, "python"), blocks(TEXT, "text")
    assert (len(code), len(said)) == (2, 2)
    scope: dict[str, Any] = {}
    for block, printed in zip(code, said, strict=True):
        exec(compile(block, "vetting.md", "exec"), scope)
        assert capsys.readouterr().out == printed


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")
