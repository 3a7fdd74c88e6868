"""What comes before torch: help, lists, the version."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.cli.display import OneLine
from fedveil.clients.packages import NOTE
from fedveil.version import __version__

KINDS = ("defenses", "attacks", "datasets", "models", "suites", "metrics")
PROBE = """
import sys
from fedveil.cli.main import run
code = run(sys.argv[1:])
heavy = sorted(name for name in ("torch", "sklearn", "scipy", "jinja2", "numpy") if name in sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["audit", "--help"], ["list", "defenses"], ["list"]])
def test_help_and_lists_come_at_once_and_without_torch(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_the_version(fedveil) -> None:
    said = fedveil("--version")
    assert (said.code, said.out, said.err) == (0, f"fedveil {__version__}\n", "")


def test_no_command_shows_the_help(fedveil) -> None:
    said = fedveil()
    assert said.code == 0
    assert "audit" in said.out


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_names_every_entry_with_its_summary(fedveil, kind: str) -> None:
    entries = json.loads(fedveil("list", kind, "--json").out)
    assert all(entry["name"] and entry["summary"] for entry in entries)
    shown = fedveil("list", kind).out.splitlines()
    assert [line.split()[0] for line in shown if re.match(r"  \S", line)] == [entry["name"] for entry in entries]
    words = " ".join(" ".join(shown).split())
    assert all(" ".join(entry["summary"].split()) in words for entry in entries)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_list_of_defenses_says_where_they_act_what_they_promise_and_whose_they_are(
    fedveil, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    entries = json.loads(fedveil("list", "defenses", "--json").out)
    assert all(entry["place"] and entry["guarantee"] for entry in entries)
    shown = fedveil("list", "defenses").out
    assert columns - 20 < max(map(len, shown.splitlines())) < columns
    blocks = [" ".join(block.split()) for block in shown.split("\n\n")]
    told = {block.partition(" ")[0]: block for block in blocks if block}
    for entry in entries:
        assert f"Acts at: {entry['place']}. Guarantee: {entry['guarantee']}." in told[entry["name"]]
        assert entry.get("paper", "") in told[entry["name"]]
    assert "Guarantee: ε-LDP of each entry's sign, per round." in told["pnpm"]  # as its base class has it
    assert "Sotthiwat" in told["gradient-dropout"]


def test_without_a_kind_everything_is_listed(fedveil) -> None:
    assert list(json.loads(fedveil("list", "--json").out)) == list(KINDS)
    assert all(f"{kind}:" in fedveil("list").out for kind in KINDS)


def test_warnings_of_ours_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.makeLogRecord({"levelname": "WARNING", "msg": "first\n  %s", "args": ("second",)})
    OneLine().emit(record)
    assert capsys.readouterr().err == "fedveil: warning: first second\n"


def test_a_note_is_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    OneLine().emit(logging.makeLogRecord({"levelname": "WARNING", "msg": "compiling", **NOTE}))
    assert capsys.readouterr().err == "fedveil: note: compiling\n"
