"""docs/membership.md is true: its code runs and comes to what it says."""

from __future__ import annotations

import pytest

from fedveil.auditing.suites import SUITES
from pages import ROOT, assert_links_lead_to_files, blocks

PAGE = ROOT / "docs" / "membership.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_code_comes_to_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (code,), (said,) = blocks(TEXT, "python"), blocks(TEXT, "text")
    exec(compile(code, "membership.md", "exec"), {})
    assert capsys.readouterr().out == said


def test_every_test_is_in_the_suites_that_are_named() -> None:
    rows = [line.split("|") for line in TEXT.splitlines() if line.startswith("| [`")]
    named = {row[1].split("`")[1]: {word.strip() for word in row[4].split(",")} for row in rows}
    assert len(named) == 4
    for attack, suites in named.items():
        assert {suite.name for suite in SUITES.values() if attack in suite.attacks} == suites


def test_the_links_lead_somewhere() -> None:
    assert_links_lead_to_files(TEXT, PAGE.parent)
