"""The shell completes names without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.cli.options import names_of
from fedveil.registry import REGISTRIES, attacks, datasets

PROBE = """
import sys
from fedveil.cli.main import run
try:
    run([])
except SystemExit:
    heavy = sorted(name for name in ("torch", "sklearn", "scipy", "jinja2", "numpy") if name in sys.modules)
    sys.exit(f"imported {heavy}" if heavy else 0)
sys.exit("completed nothing")
"""


def completed(folder: Path, **shell: str) -> str:
    """What the shell is told."""
    environment = {**os.environ, **shell}
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    "words, expected",
    [
        ("audit --defense gradient-", "gradient-dropout gradient-masking gradient-pruning"),
        ("train --defense clip+fedc", "clip+fedcrap"),
        ("audit --model lenet", "lenet lenet5"),
        ("audit --attack ", " ".join(attacks.entries())),
        ("data show cifar", "cifar10 cifar100"),
        ("list def", "defenses"),
        ("audit --suite ", "quick standard thorough"),
        ("list suites q", "quick"),
        ("list defenses sp", "spm"),
    ],
)
def test_names_are_completed(words: str, expected: str, tmp_path: Path) -> None:
    line = f"fedveil {words}"
    place = len(line.split()) - (not line.endswith(" "))
    told = completed(tmp_path, _FEDVEIL_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(place))
    assert told.split() == expected.split()


def test_every_name_can_be_completed_with_a_line_about_it() -> None:
    for kind in REGISTRIES:
        found = dict(names_of(kind)(""))
        assert list(found) == list(REGISTRIES[kind].entries())
        assert all(words and len(words) <= 60 and "\n" not in words for words in found.values())
    assert [name for name, _ in names_of("datasets")("mnist")] == ["mnist"]
    assert "mnist" in datasets.entries()


def test_the_script_for_a_shell_comes_with_the_command(fedveil, tmp_path: Path) -> None:
    assert "complete_bash" in completed(tmp_path, _FEDVEIL_COMPLETE="source_bash")
    assert "--install-completion" in fedveil("--help").out
