"""docs/attacks.md is true: its code runs and comes to what it says, and it names every attack."""

from __future__ import annotations

import re

import pytest

from fedveil.registry import attacks
from pages import ROOT, assert_links_lead_to_files, blocks, checked_audit

PAGE = ROOT / "docs" / "attacks.md"
TEXT = PAGE.read_text(encoding="utf-8")
OWN = [name for name, entry in attacks.entries().items() if entry.target.startswith("fedveil.")]
SECTIONS = dict(re.findall(r"^### `([\w-]+)`\n(.*?)(?=^### |\Z)", TEXT, re.DOTALL | re.MULTILINE))


def test_the_code_comes_to_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (code,), (said,) = blocks(TEXT, "python"), blocks(TEXT, "text")
    exec(compile(code, "attacks.md", "exec"), {})
    assert capsys.readouterr().out == said


def test_every_attack_has_its_row_and_its_section() -> None:
    table = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `")]
    assert [name for name in OWN if not any(f"`{name}`" in cell for cell in table)] == []
    assert set(SECTIONS) == set(OWN)


@pytest.mark.parametrize("name", OWN)
def test_the_command_of_a_section_is_valid_and_runs_its_attack(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(SECTIONS[name], "sh")
    (command,) = block.splitlines()
    config = checked_audit(command, monkeypatch)
    assert [attack.name for attack in config.attack] == [name]


def test_the_links_lead_somewhere() -> None:
    assert_links_lead_to_files(TEXT, PAGE.parent)
