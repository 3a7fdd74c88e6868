"""docs/attacks.md is true: its code runs and comes to what it says, and it names every attack."""

from __future__ import annotations

import pytest

from fedveil.registry import attacks
from pages import ROOT, assert_links_lead_to_files, blocks

PAGE = ROOT / "docs" / "attacks.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_code_comes_to_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (code,), (said,) = blocks(TEXT, "python"), blocks(TEXT, "text")
    exec(compile(code, "attacks.md", "exec"), {})
    assert capsys.readouterr().out == said


def test_every_attack_has_its_row() -> None:
    own = [name for name, entry in attacks.entries().items() if entry.target.startswith("fedveil.")]
    assert [name for name in own if f"`{name}`" not in TEXT] == []


def test_the_links_lead_somewhere() -> None:
    assert_links_lead_to_files(TEXT, PAGE.parent)
