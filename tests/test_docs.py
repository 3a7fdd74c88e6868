"""docs/defenses.md is true: every defense is described, as its class has it, and every example works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedveil.cli.config import Config
from fedveil.defenses.base import Defense
from fedveil.fields import field_names, parse_value
from fedveil.registry import defenses
from pages import ROOT, blocks, checked_audit
from waiting import PATIENCE

TEXT = (ROOT / "docs" / "defenses.md").read_text(encoding="utf-8")
NAMES = list(defenses.entries())
OPENING, *PARTS = re.split(r"^## ", TEXT, flags=re.MULTILINE)
HEADINGS = [part.partition("\n")[0] for part in PARTS]
SECTIONS = {heading.strip("`"): part for heading, part in zip(HEADINGS, PARTS, strict=True)}
EMPTY = "—"


def rows() -> list[list[str]]:
    """The cells of the table, without its head."""
    lines = [line for line in OPENING.splitlines() if line.startswith("|")]
    assert lines[0] == "| name | place | promises | stronger | paper |"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def defaults(text: str) -> dict[str, Any]:
    """The fields that a section names, as `field = default`."""
    found = re.findall(r"`(\w+) = ([^`]+)`", text)
    assert len({name for name, _ in found}) == len(found), "a field is named twice"
    return {name: None if value == "none" else parse_value(value) for name, value in found}


def line(text: str, start: str) -> str:
    """One point of a section, joined to one line."""
    found = re.findall(rf"^- \*\*{re.escape(start)}:\*\*(.*?)(?=\n- |\n\n)", text, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{start}: {len(found)} times"
    return " ".join(found[0].split())


def plain(made: Defense) -> dict[str, Any]:
    values = {name: getattr(made, name) for name in field_names(type(made))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def test_every_defense_has_one_section_and_no_other_has() -> None:
    assert [f"`{name}`" for name in NAMES] == HEADINGS


def test_the_table_says_what_the_classes_say() -> None:
    expected = []
    for name in NAMES:
        cls = defenses.load(name)
        stronger = f"`{cls.strength.field}` {cls.strength.stronger}" if cls.strength else EMPTY
        expected.append([f"[`{name}`](#{name})", cls.place, cls.promises, stronger, cls.paper or EMPTY])
    assert rows() == expected


@pytest.mark.parametrize("name", NAMES)
def test_sections_name_all_fields_with_their_defaults(name: str) -> None:
    assert defaults(line(SECTIONS[name], "Fields")) == plain(defenses.build(name))


@pytest.mark.parametrize("name", NAMES)
def test_sections_tell_of_the_attacker_and_of_what_is_promised(name: str) -> None:
    section = SECTIONS[name]
    assert line(section, "An attacker who knows it")
    assert line(section, "Weaknesses")
    promised = line(section, "Guarantee")
    assert promised.startswith("none") == (defenses.load(name).promises == Defense.promises)
    assert promised.count(". ") == 0, "one sentence"


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_valid_commands_for_their_defense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = checked_audit(example(name), monkeypatch)
    assert f"--defense {name}" in example(name)
    assert [each.name for each in config.defense] == ([] if name == "none" else [name])
    config.chain.check_message(config.federation.message)  # the protocol is one that the defense can protect


def example(name: str) -> str:
    """The one example of a section, which is one line."""
    (block,) = blocks(SECTIONS[name], "sh")
    (command,) = block.splitlines()
    return command


def test_the_opening_spells_one_chain_three_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    (shell,), (toml,), (python,) = (blocks(OPENING, language) for language in ("sh", "toml", "python"))
    names = ["clip", "gaussian-noise"]
    typed = checked_audit(shell.strip(), monkeypatch)
    assert [each.name for each in typed.defense] == names
    assert [each.name for each in Config.checked(tomllib.loads(toml)).defense] == names
    scope: dict[str, Any] = {}
    exec(compile(python, "defenses.md", "exec"), scope)
    assert tuple(scope["defense"]) == scope["chain"].defenses == typed.defense


def test_protocols_are_told_as_the_classes_have_them() -> None:
    told = next(" ".join(part.split()) for part in OPENING.split("\n\n") if part.startswith("Which protocol"))
    (needed,) = re.findall(r"((?:`[\w-]+`(?:, | and ))+`[\w-]+`) \(but for `at=gradient`\) need", told)
    refused = {name for name in NAMES if "gradient" not in defenses.build(name).of}
    assert set(re.findall(r"`([\w-]+)`", needed)) == refused


@pytest.mark.parametrize("name", ["clip", "spm"])
def test_some_examples_run(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fedveil", *shlex.split(example(name))[1:], "--quiet", "--out", "out"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").exists()
    assert f"Formal guarantee: {'none' if name == 'clip' else 'ε = 0.3 per release for the sign'}" in done.stdout
