"""The table of a study while it is run."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from fedveil.cli import live_table
from fedveil.cli.live_table import LiveTable
from fedveil.study.rooms import IndexedStore
from fedveil.study.studying import plan_study, run_study
from fedveil.workers import Workers

TABLE = """
title = "A table"
attack = ["link"]
[task]
data = "digits"
[[rows]]
name = "none"
[[rows]]
name = "noise"
defense = "gaussian-noise:sigma=0.1"
[[columns]]
head = "accuracy"
metric = "test"
[published.""]
noise = ["0.51"]
"""


def screen(written: str) -> list[str]:
    """What a terminal shows in the end of text that takes lines back."""
    lines = [""]
    for part in re.split(r"(\x1b\[\d+F\x1b\[J|\n)", written):
        if part == "\n":
            lines.append("")
        elif part.startswith("\x1b"):
            back = int(part[2 : part.index("F")])
            lines = [*lines[: len(lines) - 1 - back], ""]
        else:
            lines[-1] += part
    return lines


@pytest.mark.parametrize("columns", [100, 20])
def test_it_fills_up_and_is_taken_away_in_the_end(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table.toml").write_text(TABLE, encoding="utf-8")
    store, stream = IndexedStore(tmp_path / "store"), io.StringIO()
    monkeypatch.setattr(live_table.shutil, "get_terminal_size", lambda: (columns, 30))
    plan = plan_study(tmp_path / "table.toml", "smoke", store)
    table = LiveTable(plan, store, lambda cell, _: print(f"done: {cell.name}", file=stream), stream)
    shown = list[list[str]]()

    def done(cell: object, seconds: float) -> None:
        table(cell, seconds)  # type: ignore[arg-type]
        shown.append(screen(stream.getvalue()))

    run_study(plan, store, Workers(1), done=done)
    first, second = shown
    assert first[0] == "done: none, seed 0"
    assert sum("A table" in line for line in first) == sum("A table" in line for line in second) == 1
    assert any(line.startswith("noise  ") and "– [0.51]" in line for line in first) or columns == 20
    assert not any(line.startswith("noise") and "–" in line for line in second)
    assert max(map(len, second)) < max(columns, len("done: noise, seed 0") + 1)
    table.clear()
    assert screen(stream.getvalue()) == ["done: none, seed 0", "done: noise, seed 0", ""]


def test_a_low_terminal_shows_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table.toml").write_text(TABLE, encoding="utf-8")
    store, stream = IndexedStore(tmp_path / "store"), io.StringIO()
    monkeypatch.setattr(live_table.shutil, "get_terminal_size", lambda: (100, 5))
    plan = plan_study(tmp_path / "table.toml", "smoke", store)
    table = LiveTable(plan, store, lambda cell, _: print(cell.name, file=stream), stream)
    run_study(plan, store, Workers(1), done=table)
    assert stream.getvalue() == "none, seed 0\nnoise, seed 0\n"
