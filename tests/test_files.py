"""Files are written whole or not at all."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedveil.errors import FedveilError
from fedveil.files import PART, private_folder, remove_leftovers, writable_folder, write_atomically
from waiting import wait_for


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "a.bin"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.bin"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize(
    "error, seen", [(OSError(28, "No space left on device"), FedveilError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, error, seen):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(seen, match="No space left on device" if seen is FedveilError else None):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_wrong_content_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "a.bin", "text")
    assert os.listdir(tmp_path) == []


def test_a_folder_in_the_way(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(FedveilError, match=r"cannot write .*a: Is a directory"):
        write_atomically(tmp_path / "a", b"new")
    assert os.listdir(tmp_path) == ["a"]


def test_a_missing_folder(tmp_path):
    with pytest.raises(FedveilError, match="No such file or directory"):
        write_atomically(tmp_path / "none" / "a", b"new")


def test_killed_writers_leave_whole_files(tmp_path):
    path = tmp_path / "a.bin"
    size = 1_000_000
    write_atomically(path, b"0" * size)
    script = (
        "import itertools, sys, pathlib; from fedveil.files import write_atomically\n"
        f"for i in itertools.count(): write_atomically(pathlib.Path(sys.argv[1]), str(i % 10).encode() * {size})"
    )
    for wait in (0.01, 0.017, 0.023):
        before = path.stat().st_ino
        writer = subprocess.Popen([sys.executable, "-c", script, str(path)])
        wait_for(lambda old=before: path.stat().st_ino != old, failed=writer.poll)
        time.sleep(wait)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        content = path.read_bytes()
        assert len(content) == size
        assert len(set(content)) == 1

    write_atomically(path, b"whole")
    assert os.listdir(tmp_path) == ["a.bin"]  # and nothing of their unfinished files


def a_writer(path, where):
    """A process that writes `new` and stops for good at a step of it."""
    script = (
        "import os, pathlib, sys, time; from fedveil import files\n"
        f"os.{where} = lambda *_: (print('there', flush=True), time.sleep(600))\n"
        "files.write_atomically(pathlib.Path(sys.argv[1]), b'new')"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "there\n"
    return writer


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(tmp_path, where):
    write_atomically(tmp_path / "a.bin", b"old")
    (tmp_path / ".a.bin.mine").write_bytes(b"")  # whoever else has hidden files there
    writer = a_writer(tmp_path / "a.bin", where)
    try:
        (part,) = set(os.listdir(tmp_path)) - {"a.bin", ".a.bin.mine"}
        write_atomically(tmp_path / "b.bin", b"other")
        assert set(os.listdir(tmp_path)) == {"a.bin", ".a.bin.mine", "b.bin", part}
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    write_atomically(tmp_path / "b.bin", b"other")
    assert set(os.listdir(tmp_path)) == {"a.bin", ".a.bin.mine", "b.bin"}
    assert (tmp_path / "a.bin").read_bytes() == b"old"


def test_a_file_that_was_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    real, made = tempfile.mkstemp, []

    def and_removed(**given):
        made.append(real(**given))
        if len(made) == 1:
            remove_leftovers(tmp_path)  # another writer, before the lock is taken
        return made[-1]

    monkeypatch.setattr(tempfile, "mkstemp", and_removed)
    write_atomically(tmp_path / "a.bin", b"new")
    assert len(made) == 2
    assert os.listdir(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_many_writers_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: write_atomically(tmp_path / f"{i % 3}", str(i).encode()), range(200)))
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


def test_a_link_in_place_of_an_unfinished_file_is_not_followed(tmp_path):
    (tmp_path / "other").write_bytes(b"whole")
    (tmp_path / f".a{PART}").symlink_to(tmp_path / "other")
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "other").read_bytes() == b"whole"


def test_writable_folder_makes_it_and_leaves_it_empty(tmp_path):
    made = writable_folder(tmp_path / "a" / "b")
    assert made.is_dir()
    assert os.listdir(made) == []
    assert writable_folder(made) == made


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_file_in_the_way_of_a_folder(tmp_path, inside):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FedveilError, match=r"cannot write to .*file.*; choose another folder with --out"):
        writable_folder(tmp_path / "file" / inside)


def test_a_folder_nobody_can_write_to():
    # Tests may run as root, whom permissions do not stop; /proc stops root too.
    with pytest.raises(FedveilError, match="choose another folder"):
        writable_folder(Path("/proc/fedveil"))
    with pytest.raises(FedveilError, match="choose another folder"):
        writable_folder(Path("/proc/self"))


def test_a_private_folder_is_closed_to_others(tmp_path):
    made = private_folder(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    assert private_folder(tmp_path / "open").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(FedveilError, match="cannot write to"):
        private_folder(tmp_path / "file")
