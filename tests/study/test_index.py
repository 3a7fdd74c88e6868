"""The index: whole after anything, and no reason to lose a result."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedveil.errors import FedveilError
from fedveil.study.index import FILE, Index


def test_what_was_asked_is_remembered_with_the_longest_time(tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.ask("r", "train", "k", "about")
    index.ask("r", "train", "k", "about", seconds=2.0)
    index.ask("r", "train", "k", "about")
    index.ask("other", "train", "k", "about")
    (asked,) = Index(tmp_path).asked("r")
    assert (asked.stage, asked.key, asked.seconds) == ("train", "k", 2.0)


def test_cells_have_one_state_each(tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.mark("s", "a", "r", "running")
    index.mark("s", "a", "r", "done", seconds=3.0)
    index.mark("t", "a", "r", "failed", note="why")
    assert {name: (each.state, each.seconds) for name, each in index.cells("s").items()} == {"a": ("done", 3.0)}
    assert index.cells("t")["a"].note == "why"


def test_many_may_write_at_once(tmp_path: Path) -> None:
    Index(tmp_path)

    def write(who: int) -> None:
        for number in range(20):
            Index(tmp_path).ask("r", "train", f"{who} {number}", "")

    threads = [threading.Thread(target=write, args=[who]) for who in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(Index(tmp_path).asked("r")) == 80


def test_a_newer_or_damaged_index_is_told_in_a_line(tmp_path: Path) -> None:
    Index(tmp_path)
    database = sqlite3.connect(tmp_path / FILE)
    database.execute("pragma user_version = 99")
    database.close()
    with pytest.raises(FedveilError, match=r"written by a newer fedveil \(version 99"):
        Index(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database at all " * 100)
    with pytest.raises(FedveilError, match="It may be removed: what was computed lies beside it"):
        Index(tmp_path)


def test_without_a_folder_nothing_is_kept() -> None:
    index = Index(None)
    index.ask("r", "train", "k", "")
    assert index.asked("r") == []
    assert index.cells("s") == {}


@pytest.mark.parametrize("free, words", [(0, "Make room on the disk"), (2**40, "It may be removed")])
def test_a_disk_without_room_is_told_from_a_broken_one(
    free: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))

    def fails(*arguments: object, **keywords: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite3, "connect", fails)
    with pytest.raises(FedveilError, match=words):
        index.mark("s", "a", "r", "running")
