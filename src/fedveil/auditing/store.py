"""The store: what the stages of audits came to, kept by content, so that no audit computes again what another has.

An entry is a folder, STAGE/KEY, with a file `entry.safetensors` and perhaps larger files beside it. It appears whole or
not at all. Its key is a hash of all that it depends on: see `keys`. Entries hold victims' data and pictures of it, so
only the user may enter the store.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.files import private_folder
from fedveil.ownership import InUse, leased
from fedveil.tensorfile import Header, read_tensors, write_tensors

StageName = Literal["train", "observe", "fit", "attack", "score", "result"]
STAGES: tuple[StageName, ...] = get_args(StageName)
FORMAT, VERSION = "fedveil-entry", 1
ENTRY = "entry.safetensors"
UNFINISHED = ".unfinished"  # ends the name of the folder of an entry that is not whole yet
WRITTEN = ".entry"  # before that ending: it is being written, and all that it is made from is done
LOCK = ".lock"

T = TypeVar("T")
Name = TypeVar("Name")


@dataclass(frozen=True)
class Wanted:
    """A result that a stage is asked for."""

    key: str
    about: str  # a line for people


@dataclass(frozen=True, eq=False)
class Entry:
    """What is kept: tensors by name, plain data, and files beside them."""

    tensors: Mapping[str, Tensor]
    facts: Any = None  # anything that JSON holds
    files: Mapping[str, Path] = field(default_factory=dict)  # by name, in the entry's folder


class Form(Protocol[T]):
    """How a stage's result becomes an entry, and back."""

    def to_entry(self, result: T, folder: Path) -> Entry:
        """The entry of a result. Large files are written into the folder and named in the entry."""
        ...

    def from_entry(self, entry: Entry) -> T:
        """The result of an entry."""
        ...


class EntryHeader(Header):
    """The JSON header of an entry's file."""

    stage: str
    key: str
    about: str
    facts: str  # JSON
    hashes: dict[str, str]  # SHA-256 of the files beside it


@dataclass(frozen=True)
class Listed:
    """An entry as a list shows it."""

    stage: StageName
    place: Path
    about: str
    bytes: int
    used: datetime.datetime  # last written or read


class Store:
    """A folder of entries that many audits share, also at the same time; without a folder nothing is kept.

    `made` lists the results that were computed and not found: an audit that finds everything makes nothing.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.made: list[tuple[StageName, str]] = []

    @classmethod
    def of(cls, given: Store | Path | str | None) -> Store:
        """The store that is meant."""
        return given if isinstance(given, Store) else cls(given)

    def keep(self, stage: StageName, wanted: Wanted, form: Form[T], make: Callable[[Path | None], T]) -> T:
        """The result of a stage: from its entry if that is there and whole, else made and kept.

        make: is given a folder of its own for unfinished work, which it finds again after a kill.
        """
        return self.keep_all(stage, {0: wanted}, form, lambda missing, folder: [(0, make(folder))])[0]

    def keep_all(
        self,
        stage: StageName,
        wanted: Mapping[Name, Wanted],
        form: Form[T],
        make: Callable[[list[Name], Path | None], Iterable[tuple[Name, T]]],
    ) -> dict[Name, T]:
        """Several results of one stage, of which those that are missing are made together.

        make: is given the names of the missing ones, and a folder for unfinished work. Each result is kept as it
            comes, so that a stop loses only those that are still to come.
        """
        if self.folder is None:
            self.made += [(stage, each.about) for each in wanted.values()]
            return dict(make(list(wanted), None))
        room = private_folder(private_folder(self.folder) / stage)
        with ExitStack() as stack:
            for key in sorted({each.key for each in wanted.values()}):  # in one order: no two wait for each other
                stack.enter_context(leased(room / f"{key}{LOCK}"))
            found = {name: self._read(room, each.key, form) for name, each in wanted.items()}
            for name, result in found.items():
                if result is not None:  # what a kill may have left of the work on it
                    shutil.rmtree(room / f"{wanted[name].key}{UNFINISHED}", ignore_errors=True)
            # Two names may want the same: it is made once.
            missing = {each.key: name for name, each in wanted.items() if found[name] is None}
            if missing:
                names = [name for name in wanted if name in missing.values()]
                unfinished = private_folder(room / f"{wanted[names[0]].key}{UNFINISHED}")
                fresh: dict[Name, T] = {}
                for name, made in make(names, unfinished):
                    self._put(stage, room, wanted[name], form, made)
                    self.made.append((stage, wanted[name].about))
                    fresh[name] = made
                shutil.rmtree(unfinished, ignore_errors=True)
                found |= {name: fresh[missing[wanted[name].key]] for name, old in found.items() if old is None}
            return {name: result for name, result in found.items() if result is not None}

    def found(self, stage: StageName, key: str, form: Form[T]) -> T | None:
        """The result that is kept under a key; None if there is none."""
        if self.folder is None or not (self.folder / stage / key).is_dir():
            return None
        room = self.folder / stage
        with leased(room / f"{key}{LOCK}"):
            return self._read(room, key, form)

    def _read(self, room: Path, key: str, form: Form[T]) -> T | None:
        """The result of an entry, or None if there is none; a damaged one, or of another version, is removed."""
        place = room / key
        if not place.exists():
            return None
        try:
            header, tensors = read_tensors(place / ENTRY, EntryHeader, FORMAT, VERSION)
            files = {name: place / name for name in header.hashes}
            if header.key != key or any(_sha256(files[name]) != said for name, said in header.hashes.items()):
                raise ValueError("another entry, or a damaged one")
            result = form.from_entry(Entry(tensors, json.loads(header.facts), files))
            with suppress(OSError):
                os.utime(place / ENTRY)
            return result
        except (FedveilError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            shutil.rmtree(place, ignore_errors=True)
            return None

    def _put(self, stage: StageName, room: Path, wanted: Wanted, form: Form[T], result: T) -> None:
        """Write an entry beside its place, and move it there."""
        # Not the folder of the work itself, which may still go on for other entries.
        unfinished = private_folder(room / f"{wanted.key}{WRITTEN}{UNFINISHED}")
        entry = form.to_entry(result, unfinished)
        header = EntryHeader(
            format=FORMAT,
            version=VERSION,
            stage=stage,
            key=wanted.key,
            about=wanted.about,
            facts=json.dumps(entry.facts),
            hashes={name: _sha256(path) for name, path in entry.files.items()},
        )
        write_tensors(unfinished / ENTRY, header, entry.tensors)
        os.replace(unfinished, room / wanted.key)

    # ---- what a user does with it ------------------------------------------------------------------------

    def entries(self) -> list[Listed]:
        """All entries, the one that was used longest ago first."""
        folders = [(stage, self.folder / stage) for stage in STAGES] if self.folder is not None else []
        found = [_listed(stage, place) for stage, room in folders for place in room.glob("*") if place.is_dir()]
        return sorted(found, key=lambda each: each.used)

    def prune(self, older_than: datetime.timedelta = datetime.timedelta(0)) -> list[Listed]:
        """Remove the entries that were not used for so long, and return them. What is in use now stays."""
        now = datetime.datetime.now(datetime.UTC)
        gone = []
        for each in self.entries():
            if now - each.used < older_than:
                continue
            key = each.place.name.removesuffix(UNFINISHED).removesuffix(WRITTEN)
            with suppress(InUse), leased(each.place.with_name(f"{key}{LOCK}"), wait=False):
                shutil.rmtree(each.place, ignore_errors=True)
                gone.append(each)
        return gone


def _listed(stage: StageName, place: Path) -> Listed:
    try:
        header, _ = read_tensors(place / ENTRY, EntryHeader, FORMAT, VERSION)
        about, marked = header.about, place / ENTRY
    except FedveilError:
        unfinished = place.name.endswith(UNFINISHED)
        about, marked = ("unfinished" if unfinished else "damaged, or of another version"), place
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    used = datetime.datetime.fromtimestamp(marked.stat().st_mtime, datetime.UTC)
    return Listed(stage, place, about, size, used)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
