"""The README is true: its Python runs, its commands work, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_commands_run(tmp_path: Path) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("fedveil ")]
    assert len(commands) >= 4
    for command in commands:
        words = [sys.executable, "-m", "fedveil", *shlex.split(command, comments=True)[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert (tmp_path / "fedveil-out/readme/report.html").exists()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in (line for block in blocks("sh") for line in block.splitlines() if line.startswith("make ")):
        assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_registered_method_is_named() -> None:
    """What works is in the README's table or the page it links to, and every class can be reached as fedveil.NAME."""
    import fedveil
    from fedveil.registry import REGISTRIES

    told = (README + (ROOT / "docs/defenses.md").read_text(encoding="utf-8")).lower()
    for kind in ("defenses", "attacks", "models"):
        for name, entry in REGISTRIES[kind].entries().items():
            assert name in told or name.replace("-", " ") in told, name
            if kind != "models":
                assert entry.target.partition(":")[2] in fedveil.__all__, name
    for name in REGISTRIES["datasets"].entries():
        family = "medmnist" if name.endswith("mnist") and name not in ("mnist", "fashion-mnist") else name
        assert family.replace("-", "") in told.replace("-", "").replace(" ", ""), name
