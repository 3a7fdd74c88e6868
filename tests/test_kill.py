"""The campaign of `make kill` itself: it sees what is lost, differs or stays behind; and a short one passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import safetensors.torch
import torch
from kill import traces as outside
from kill.__main__ import table
from kill.campaign import campaign
from kill.compare import differences
from kill.program import changes
from kill.scenarios import SCENARIOS


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the same in them, written at different times."""
    for name, seconds in (("one", 1.0), ("other", 2.0)):
        folder = tmp_path / name
        (folder / "captures").mkdir(parents=True)
        (folder / "history.json").write_text(json.dumps({"rounds": 2, "history": [{"loss": 0.5, "seconds": seconds}]}))
        told = json.dumps({"history": [{"round": 1, "seconds": seconds}]})
        content = safetensors.torch.save({"w": torch.ones(3)}, {"fedveil": told})
        (folder / "captures" / "a.safetensors").write_bytes(content)
    return tmp_path / "one", tmp_path / "other"


def test_times_do_not_count(pair: tuple[Path, Path]) -> None:
    assert (pair[0] / "history.json").read_bytes() != (pair[1] / "history.json").read_bytes()
    assert differences(*pair) == []


def test_every_other_bit_counts(pair: tuple[Path, Path]) -> None:
    (pair[0] / "history.json").write_text(json.dumps({"rounds": 2, "history": [{"loss": 0.25, "seconds": 1.0}]}))
    path = pair[0] / "captures" / "a.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert differences(*pair) == ["captures/a.safetensors", "history.json"]


def test_missing_and_hidden_files_count(pair: tuple[Path, Path]) -> None:
    (pair[0] / "history.json").unlink()
    (pair[0] / "captures" / ".left").touch()
    assert differences(*pair) == ["history.json is missing", "captures/.left is left over"]


def test_files_and_memory_that_are_left_are_found(tmp_path: Path) -> None:
    before = outside.shared_memory()
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as process:
        pass
    (tmp_path / "left").touch()
    assert outside.traces(process.pid, tmp_path, before) == ["temporary file left"]
    (tmp_path / "left").unlink()
    assert outside.traces(process.pid, tmp_path, before) == []


@pytest.mark.skipif(not outside.SHARED.exists(), reason="shared memory has no folder here")
def test_shared_memory_that_nobody_uses_is_found(tmp_path: Path) -> None:
    before = outside.shared_memory()
    memory = shared_memory.SharedMemory(create=True, size=16)
    used = outside._used(memory.name)
    memory.close()
    left = not outside._used(memory.name)
    memory.unlink()
    assert used
    assert left
    assert memory.name not in outside.shared_memory() - before


def test_processes_that_are_left_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "PATIENCE", 0.1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        assert outside.traces(process.pid, tmp_path, set()) == [f"processes of group {process.pid} still run"]
        process.kill()


@pytest.mark.parametrize(
    "event, arguments, counts",
    [
        ("open", ("/run/out/a", "xb", os.O_WRONLY | os.O_CREAT), True),
        ("open", ("/run/out/a", "rb", os.O_RDONLY), False),
        ("open", ("/run/else", "wb", os.O_WRONLY), False),
        ("open", (3, "wb", os.O_WRONLY), False),
        ("os.rename", ("/run/out/a", "/run/out/b", -1, -1), True),
        ("os.remove", ("/run/out/a", -1), True),
        ("import", ("/run/out/a",), False),
    ],
)
def test_what_changes_a_folder(event: str, arguments: tuple[object, ...], counts: bool) -> None:
    assert changes(event, arguments, "/run/out") is counts


def test_three_kills_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "cache"))
    tallies = campaign(SCENARIOS[1:3], 3, 0, tmp_path)  # one of each command; the others start workers, too
    assert [fault for tally in tallies.values() for fault in tally.faults] == []
    assert sum(tally.kills for tally in tallies.values()) == 3
    assert table(tallies).splitlines()[-1].split()[2] == "3"
