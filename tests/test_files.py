"""Files are written whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedveil.errors import FedveilError
from fedveil.files import writable_folder, write_atomically


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
        limit = time.monotonic() + 30
        while path.stat().st_ino == before and time.monotonic() < limit:
            time.sleep(0.001)
        time.sleep(wait)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        content = path.read_bytes()
        assert len(content) == size
        assert len(set(content)) == 1


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
