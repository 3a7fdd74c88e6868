"""docs/loops.md is true: its code runs, one block after another."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pages import ROOT, assert_links_lead_to_files, blocks

TEXT = (ROOT / "docs" / "loops.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore")
def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for library in ("lightning", "transformers", "accelerate", "skorch"):
        pytest.importorskip(library)
    scope: dict[str, Any] = {}
    code = blocks(TEXT, "python")
    assert len(code) == 3
    for block in code:
        exec(compile(block, "loops.md", "exec"), scope)
    told = re.findall(r"^# (Formal .*)$", TEXT, re.MULTILINE)
    assert len(told) == 1
    assert set(told) <= set(capsys.readouterr().out.splitlines())
    assert scope["protect"].guard.ledger.state_dict()["spent"][0]["times"] == 2
    assert scope["guard"].ledger.state_dict()["spent"][0]["client"] == 3


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")
