"""The campaign of `make fuzz` itself: it sees what a broken reader does, and passes a sound one."""

from __future__ import annotations

import faulthandler
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import campaign as outside
from fuzz.campaign import Tally, campaign
from fuzz.data_readers import DATA_READERS
from fuzz.mutate import damaged
from fuzz.reader import Files, Reader, Refused
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fedveil.errors import FedveilError

FILES = 25  # of which about half start with a zero
VALID = b"\0" + bytes(range(60))


def files() -> SearchStrategy[Files]:
    broken = st.binary(max_size=20).map(lambda more: b"\xff" + more)
    return st.one_of(damaged(VALID), broken).map(lambda content: {"file": content})


def bad(folder: Path) -> bool:
    """Whether a broken reader should misbehave on this file."""
    return (folder / "file").read_bytes()[:1] != b"\0"


def run(read: Callable[[Path], object], keep: Path, seed: int = 0, count: int = FILES) -> Tally:
    return campaign([Reader("toy", files, read)], count, seed, keep)["toy"]


def sound(folder: Path) -> object:
    if bad(folder):
        raise FedveilError(f"{folder / 'file'}: not a file of this kind")
    return (folder / "file").read_bytes()


def says_no_otherwise(folder: Path) -> object:
    if bad(folder):
        raise Refused
    return None


@pytest.mark.parametrize("read", [sound, says_no_otherwise])
def test_a_sound_reader_passes(tmp_path: Path, read: Callable[[Path], object]) -> None:
    tally = run(read, tmp_path)
    assert tally.files == FILES
    assert tally.counts["accepted"] > 2
    assert tally.counts["refused"] > 2
    assert not tally.wrong
    assert not list(tmp_path.iterdir())


def crashes(folder: Path) -> None:
    if bad(folder):
        faulthandler._sigsegv()  # type: ignore[attr-defined]


def hangs(folder: Path) -> None:
    while folder.exists():
        pass


def raises(folder: Path) -> None:
    struct.unpack(">I", (folder / "file").read_bytes()[:4] if not bad(folder) else b"")


def ends_the_process(folder: Path) -> None:
    if bad(folder):
        os._exit(0)


def takes_memory(folder: Path) -> None:
    bytearray(2**30 if bad(folder) else 1)


def hides_that_memory_ran_out(folder: Path) -> None:
    try:
        takes_memory(folder)
    except MemoryError:
        raise FedveilError("damaged") from None


def unpickles(folder: Path) -> None:
    if bad(folder):
        pickle.loads(b"cos\nsystem\n(S'true'\ntR.")


def evaluates_and_hides_it(folder: Path) -> None:
    try:
        if bad(folder):
            eval("1")
    except BaseException:
        raise FedveilError("damaged") from None


def starts_a_program(folder: Path) -> None:
    if bad(folder):
        os.system("true")


def writes_outside(folder: Path) -> None:
    (folder / "inside").write_bytes(b"")
    if bad(folder):
        (folder / ".." / "x").write_bytes(b"")


def writes_through_a_link(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent.parent)
    (folder / "link" / "x" if bad(folder) else folder / "x").mkdir()


def removes_outside(folder: Path) -> None:
    if bad(folder):
        os.rmdir(folder.parent)


class Rambling(FedveilError):
    """Says exactly what it was given."""

    def __init__(self, said: str) -> None:
        self.said = said

    def __str__(self) -> str:
        return self.said


def says_two_lines(folder: Path) -> None:
    raise Rambling("one\ntwo" if bad(folder) else "one")


def says_a_page(folder: Path) -> None:
    raise Rambling("x" * 100_000 if bad(folder) else "x")


@pytest.mark.parametrize(
    "read, kind",
    [
        (crashes, "crash"),
        (ends_the_process, "crash"),
        (raises, "exception"),
        (takes_memory, "memory"),
        (hides_that_memory_ran_out, "memory"),
        (unpickles, "code or write"),
        (evaluates_and_hides_it, "code or write"),
        (starts_a_program, "code or write"),
        (writes_outside, "code or write"),
        (writes_through_a_link, "code or write"),
        (removes_outside, "code or write"),
        (says_two_lines, "message"),
        (says_a_page, "message"),
    ],
)
def test_a_broken_reader_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], kind: str
) -> None:
    monkeypatch.setattr(outside, "PATIENCE", 600.0)  # for a busy machine
    count = 6 if kind == "crash" else FILES  # a file that kills its worker takes a new one
    tally = run(read, tmp_path, count=count)
    assert tally.counts[kind] >= 2
    assert tally.counts[kind] == tally.wrong
    kept = [verdict.files for verdicts in tally.faults.values() for verdict in verdicts if verdict.files]
    assert kept
    assert all((folder / "file").read_bytes()[:1] != b"\0" for folder in kept)


def test_a_reader_that_hangs_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "PATIENCE", 0.5)  # whatever the machine is doing: no file has an end
    tally = run(hangs, tmp_path, count=2)
    assert tally.counts["hang"] == tally.files == 2


def test_the_same_seed_makes_the_same_files(tmp_path: Path) -> None:
    def contents(seed: int) -> dict[str, bytes]:
        keep = tmp_path / str(len(list(tmp_path.iterdir())))
        run(raises, keep, seed)
        return {path.parent.name: path.read_bytes() for path in sorted(keep.rglob("file"))}

    first = contents(0)
    assert first
    assert contents(0) == first
    assert contents(1) != first


@pytest.mark.parametrize("name", ["idx", "cifar10", "archive"])
def test_the_readers_stand_a_short_campaign(tmp_path: Path, name: str) -> None:
    reader = next(each for each in DATA_READERS if each.name == name)
    tally = campaign([reader], 80, 1, tmp_path)[reader.name]
    assert tally.files == 80
    assert not tally.faults
    assert tally.counts["accepted"]
    assert tally.counts["refused"]
