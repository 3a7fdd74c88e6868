"""The index of a store for grids of audits: which stages each result asked for, and how long they took.

The stages themselves lie in the store. The index can be removed at any time: only plans and times get less exact.
SQLite in WAL mode, so that several processes read and write it at once and a kill at any moment leaves it whole.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import FedveilError
from fedveil.files import private_folder

FILE = "index.sqlite"
VERSION = 1
LITTLE = 2**20  # bytes on a disk that is as good as full
WAIT = 60.0  # seconds for another process to finish writing

_TABLES = """
create table if not exists stages (
    result text not null, stage text not null, key text not null, about text not null, seconds real not null,
    primary key (result, stage, key)
) without rowid;
create table if not exists results (
    study text not null, cell text not null, result text not null, state text not null,
    seconds real not null default 0, note text not null default '', changed real not null,
    primary key (study, cell)
) without rowid;
create table if not exists experiments (settings text primary key, result text not null) without rowid;
"""


@dataclass(frozen=True)
class Asked:
    """A stage that a result asked for."""

    stage: str
    key: str
    seconds: float  # that it took to make; 0 where it was there, or is not done yet


@dataclass(frozen=True)
class CellState:
    """How far a cell of a study is."""

    cell: str
    result: str  # its key
    state: str  # "running", "done" or "failed"
    seconds: float
    note: str  # why it failed
    changed: float  # when, in seconds since 1970


class Index:
    """The index in a store's folder; without a folder nothing is written down."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else private_folder(folder) / FILE
        with self._open() as database:
            if database is None:
                return
            found = int(database.execute("pragma user_version").fetchone()[0])
            if found > VERSION:
                raise FedveilError(
                    f"{self._path} was written by a newer fedveil (version {found}, this one reads {VERSION}): "
                    "use that one, or another --store"
                )
            database.execute("pragma journal_mode = wal")
            database.executescript(_TABLES)
            database.execute(f"pragma user_version = {VERSION}")

    def ask(self, result: str, stage: str, key: str, about: str, *, seconds: float = 0.0) -> None:
        """Write down that a result asks for a stage and, once it was made, how long that took."""
        with self._open() as database:
            if database is not None:
                database.execute(
                    "insert into stages values (?, ?, ?, ?, ?) on conflict do update set "
                    "seconds = max(seconds, excluded.seconds)",
                    (result, stage, key, about, seconds),
                )

    def asked(self, result: str) -> list[Asked]:
        """The stages that a result asked for so far."""
        with self._open() as database:
            if database is None:
                return []
            rows = database.execute("select stage, key, seconds from stages where result = ?", (result,))
            return [Asked(*row) for row in rows]

    def name(self, settings: str, result: str) -> None:
        """Write down which result an experiment has: it can then be found without reading its data."""
        with self._open() as database:
            if database is not None:
                database.execute("insert or replace into experiments values (?, ?)", (settings, result))

    def named(self, settings: str) -> str | None:
        """The key of the result that an experiment had when it was last opened."""
        with self._open() as database:
            if database is None:
                return None
            found = database.execute("select result from experiments where settings = ?", (settings,)).fetchone()
            return None if found is None else str(found[0])

    def mark(self, study: str, cell: str, result: str, state: str, *, seconds: float = 0.0, note: str = "") -> None:
        """Write down how far a cell of a study is."""
        with self._open() as database:
            if database is not None:
                database.execute(
                    "insert or replace into results values (?, ?, ?, ?, ?, ?, ?)",
                    (study, cell, result, state, seconds, note, time.time()),
                )

    def cells(self, study: str) -> dict[str, CellState]:
        """The cells of a study that were begun, by name."""
        with self._open() as database:
            if database is None:
                return {}
            rows = database.execute(
                "select cell, result, state, seconds, note, changed from results where study = ?", (study,)
            )
            return {row[0]: CellState(*row) for row in rows}

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        """A connection of its own each time: they do not survive in another process or thread."""
        if self._path is None:
            yield None
            return
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=WAIT, isolation_level=None)) as database:
                yield database
        except sqlite3.DatabaseError as error:
            raise FedveilError(f"cannot use {self._path}: {error}. {_remedy(error, self._path)}") from None


def _remedy(error: sqlite3.DatabaseError, path: Path) -> str:
    # A disk that has no room for the database's shared memory is an "I/O error" to SQLite.
    if "full" in str(error) or ("I/O" in str(error) and shutil.disk_usage(path.parent).free < LITTLE):
        return "Make room on the disk and start again: what was computed is kept"
    if "readonly" in str(error) or "unable to open" in str(error):
        return "Choose a --store that you may write to"
    return "It may be removed: what was computed lies beside it and is found again"
