"""One owner of a folder at a time: another process, another thread, the same thread again, and one that died."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedveil as fv
from federation.small import small_task
from fedveil.errors import FedveilError
from fedveil.federation.settings import FederationSettings
from fedveil.files import PART
from fedveil.ownership import LOCK, InUse, leased, owned

HOLD = """
import sys, time
from fedveil.ownership import owned
with owned(sys.argv[1]):
    print("owned", flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder "taken"."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "taken"), "two words"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "owned\n"
        yield holder
        holder.kill()


def test_another_process_is_named_in_one_line(other: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(InUse) as caught, owned(tmp_path / "taken"):
        pytest.fail("two owners")
    said = str(caught.value)
    assert re.search(
        rf"taken is in use by `-c .*'two words'` \(process {other.pid}, since \d{{4}}-\d\d-\d\d \d\d:", said
    )
    assert "choose another folder" in said
    assert (tmp_path / "taken" / LOCK).exists()  # it is still theirs


def test_a_dead_owner_does_not_stand_in_the_way(other: subprocess.Popen[str], tmp_path: Path) -> None:
    other.kill()
    other.wait()
    assert os.listdir(tmp_path / "taken") == [LOCK]
    with owned(tmp_path / "taken"):
        assert f"process {os.getpid()}" in (tmp_path / "taken" / LOCK).read_text()
    assert os.listdir(tmp_path / "taken") == []


def test_python_runs_are_refused_too(other: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match="taken is in use by"):
        fv.federate(small_task(), None, FederationSettings(rounds=1), folder=tmp_path / "taken")
    assert os.listdir(tmp_path / "taken") == [LOCK]


def test_the_owner_may_take_it_again_and_another_thread_not(tmp_path: Path) -> None:
    refused: list[bool] = []

    def take() -> None:
        try:
            with owned(tmp_path):
                refused.append(False)
        except InUse:
            refused.append(True)

    def in_a_thread() -> None:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    with owned(tmp_path):
        with owned(str(tmp_path / ".")):
            in_a_thread()
        in_a_thread()  # it is still ours after the inner block
        (tmp_path / "link").symlink_to(tmp_path)
        with owned(tmp_path / "link"):
            pass
    in_a_thread()
    assert refused == [True, True, False]
    assert os.listdir(tmp_path) == ["link"]


def test_a_folder_that_stayed_empty_goes_and_one_that_was_there_stays(tmp_path: Path) -> None:
    with owned(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert os.listdir(tmp_path) == []
    (tmp_path / "a").mkdir()
    with owned(tmp_path / "a" / "b"):
        pass
    assert os.listdir(tmp_path) == ["a"]
    with owned(tmp_path / "c" / "d"):
        (tmp_path / "c" / "file").touch()
    assert os.listdir(tmp_path / "c") == ["file"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "attacks").mkdir()
    left = [tmp_path / f".result.json.0a1b2c3d{PART}", tmp_path / "attacks" / f".x.0a1b2c3d{PART}"]
    mine = [tmp_path / ".hidden", tmp_path / ".download.part", tmp_path / f"report{PART}"]
    for path in left + mine:
        path.touch()
    with owned(tmp_path):
        assert not any(path.exists() for path in left)
    assert all(path.exists() for path in mine)


def test_no_folder_has_no_owner() -> None:
    with owned(None):
        pass


# ---- leases ------------------------------------------------------------------------------------------


def test_a_lease_is_one_threads_at_a_time_and_leaves_nothing(tmp_path: Path) -> None:
    running: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(3):
            with leased(tmp_path / "key.lock"):
                running.append(number)
                time.sleep(0.002)  # others get their turn, if there is no lease
                most.append(len(running))
                running.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 12
    assert max(most) == 1
    assert os.listdir(tmp_path) == []


def test_who_waits_for_a_lease_is_told_for_whom_and_gets_it(other: subprocess.Popen[str], tmp_path: Path) -> None:
    told: list[str] = []

    def on_wait(owner: str) -> None:
        told.append(owner)
        other.kill()  # the lease of a dead process is free

    with leased(tmp_path / "taken" / LOCK, on_wait):
        assert f"process {os.getpid()}" in (tmp_path / "taken" / LOCK).read_text()
        with leased(tmp_path / "taken" / LOCK, lambda _: pytest.fail("a thread waits for itself")):
            pass
        assert (tmp_path / "taken" / LOCK).exists()
    assert len(told) == 1
    assert f"process {other.pid}" in told[0]
    assert os.listdir(tmp_path / "taken") == []
