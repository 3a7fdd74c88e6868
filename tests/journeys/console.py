"""The command line as a user has it: in this process, which is quick, or as a program of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedveil.cli.main import run
from waiting import PATIENCE

SMALL = ("--data", "digits", "--model", "mlp:hidden=[16]", "--limit", "120", "--clients", "2")
QUICK = (*SMALL, "--rounds", "2", "--victims", "3", "--attack", "inverting-gradients:steps=12", "--candidates", "10")


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str


Fedveil = Callable[..., Said]


def environment() -> dict[str, str]:
    """For a program of its own: one thread, and no output of the caller's."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def program(*arguments: str | Path) -> list[str]:
    """The command as a program."""
    return [sys.executable, "-c", "from fedveil.cli import main; main()", *map(str, arguments)]


def run_program(*arguments: str | Path, cwd: Path) -> Said:
    """Run the command in a process of its own."""
    done = subprocess.run(
        program(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    return Said(done.returncode, done.stdout, done.stderr)


def refused(said: Said, *words: str) -> None:
    """One line that says what is wrong and what would be right; a usage error's code; no traceback."""
    assert said.code == 2, said
    assert said.err.count("\n") == 1, said.err
    assert re.match(r"fedveil: \S", said.err), said.err
    assert said.err.endswith("\n")
    assert "Traceback" not in said.err + said.out
    assert said.out == ""
    for word in words:
        assert word in said.err, f"{word!r} is not in {said.err!r}"


def files(folder: Path) -> list[str]:
    """All files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def fedveil(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fedveil:
    """Run a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> Said:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return call
