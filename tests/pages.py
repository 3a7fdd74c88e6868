"""What the tests of README.md and docs/ share: the blocks of a page, its links, its commands run as a user would."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.cli import runs
from fedveil.cli.config import Config
from fedveil.cli.main import run
from fedveil.cli.options import Given
from waiting import PATIENCE

ROOT = Path(__file__).parents[1]


def blocks(text: str, language: str) -> list[str]:
    """The blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def assert_links_lead_to_files(text: str, folder: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (folder / target).exists(), target


def checked_audit(command: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The checked configuration of an audit's command line; nothing is run."""
    given: list[Given] = []
    monkeypatch.setattr(runs, "run_audit", given.append)
    program, *words = shlex.split(command)
    assert (program, words[0]) == ("fedveil", "audit")
    assert run(words) == 0, command
    return Config.load("audit", given[0])


def assert_runs(command: str, folder: Path) -> None:
    """Run a `fedveil ...` of a page in a folder."""
    words = [sys.executable, "-m", "fedveil", *shlex.split(command, comments=True)[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
