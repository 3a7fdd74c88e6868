"""The README is true: its Python runs, its commands work, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import ROOT, assert_links_lead_to_files, assert_runs, blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", blocks(README, "python"))
def test_python_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_commands_run(tmp_path: Path) -> None:
    commands = [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("fedveil ")]
    assert len(commands) >= 4
    for command in commands:
        assert_runs(command, tmp_path)
    assert (tmp_path / "fedveil-out/readme/report.html").exists()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in (line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("make ")):
        assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(README, ROOT)


def test_every_registered_method_is_named() -> None:
    """What works is in the README's table or on the page that it links to."""
    from fedveil.registry import REGISTRIES

    pages = ((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("defenses.md", "attacks.md"))
    told = "".join([README, *pages]).lower()
    for kind in ("defenses", "attacks", "models"):
        for name in REGISTRIES[kind].entries():
            assert name in told or name.replace("-", " ") in told, name
    for name in REGISTRIES["datasets"].entries():
        family = "medmnist" if name.endswith("mnist") and name not in ("mnist", "fashion-mnist") else name
        assert family.replace("-", "") in told.replace("-", "").replace(" ", ""), name
