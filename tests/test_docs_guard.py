"""docs/guard.md is true: its code runs, one block after another."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pages import ROOT, assert_links_lead_to_files, blocks

TEXT = (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    code = blocks(TEXT, "python")
    assert len(code) == 9
    for block in code:
        exec(compile(block, "guard.md", "exec"), scope)
    assert all(parameter.isfinite().all() for parameter in scope["model"].parameters())
    told = re.findall(r"^# (Formal .*)$", TEXT, re.MULTILINE)
    assert len(told) == 2
    assert capsys.readouterr().out.splitlines() == told


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")
