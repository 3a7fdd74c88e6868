"""Carry out the audits of a grid: one after the other, or several at once in processes of one thread each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.workshop import Workshop
from fedveil.errors import FedveilError
from fedveil.federation.observers import Watch
from fedveil.ownership import InUse, leased
from fedveil.study.rooms import IndexedStore, Rooms, alike, result_key
from fedveil.workers import Workers

CLAIMS = "claims"  # folder of the store with the lock of every result that is being made


@dataclass(frozen=True, eq=False)
class Cell:
    """One audit of a grid."""

    name: str  # "MNIST, gradient-dropout:keep=0.5, seed 0"
    experiment: Experiment


@dataclass(frozen=True, eq=False)
class Grid:
    """Cells under one name in the index, and the command that makes them again."""

    study: str
    cells: Sequence[Cell]
    command: str


Done = Callable[[Cell, float], None]  # told of every cell that is there, with the seconds that it took now


def audited(
    grid: Grid, store: IndexedStore, workers: Workers, watch: Watch | None = None, done: Done | None = None
) -> Iterator[tuple[Cell, AuditResult]]:
    """The results of all cells, in their order, once all are there.

    Cells that another process works on are left to it, and waited for in the end. With several workers each takes whole
    audits, for which the store needs a folder.
    """
    if workers.forced:
        _in_processes(grid, store, workers, done)
        workers = Workers(1)
    rooms = Rooms(store, workers, watch)
    kept: dict[str, AuditResult] = {}
    for wait in (False, True):
        for cell in grid.cells:
            if cell.name not in kept:
                start = time.perf_counter()
                result = audit_cell(rooms, grid, cell, wait=wait)
                if result is not None:
                    kept[cell.name] = result
                    if done is not None:
                        done(cell, time.perf_counter() - start)
    yield from ((cell, kept[cell.name]) for cell in grid.cells)


def audit_cell(rooms: Rooms, grid: Grid, cell: Cell, *, wait: bool) -> AuditResult | None:
    """The result of one cell; None if another process is making it and it is not to be waited for."""
    shop = rooms.open(cell.experiment)
    key = result_key(shop)
    if rooms.store.folder is None:
        return rooms.audit(shop, grid.command)
    claims = rooms.store.folder / CLAIMS
    claims.mkdir(exist_ok=True)
    try:
        with leased(claims / f"{key}.lock", wait=wait):
            return _audited(rooms, shop, grid, cell.name, key)
    except InUse:
        return None


def _audited(rooms: Rooms, shop: Workshop, grid: Grid, name: str, key: str) -> AuditResult:
    index, start, there = rooms.store.index, time.perf_counter(), rooms.store.holds("result", key)
    if not there:
        index.mark(grid.study, name, key, "running")
    try:
        result = rooms.audit(shop, grid.command)
    except FedveilError as error:
        index.mark(grid.study, name, key, "failed", note=str(error))
        raise
    known = index.cells(grid.study).get(name)
    if known is None or known.state != "done" or not there:
        index.mark(grid.study, name, key, "done", seconds=time.perf_counter() - start)
    return result


# ---- several processes -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Job:
    """What a process needs to make the result of one cell."""

    grid: Grid  # with this cell alone
    folder: Path


_rooms: dict[Path, Rooms] = {}  # of this process, which finds its tasks and engines again


def _make(job: Job) -> float:
    rooms = _rooms.get(job.folder)
    if rooms is None:
        rooms = _rooms[job.folder] = Rooms(IndexedStore(job.folder), Workers(1))
    start = time.perf_counter()
    audit_cell(rooms, job.grid, job.grid.cells[0], wait=False)
    return time.perf_counter() - start


def _in_processes(grid: Grid, store: IndexedStore, workers: Workers, done: Done | None) -> None:
    if store.folder is None:
        raise FedveilError("several workers share what they compute through a store: name a folder with --store")
    jobs = [Job(Grid(grid.study, [cell], grid.command), store.folder) for cell in grid.cells]
    # What cells have in common is made by the first of each task and seed; the others would only wait for it.
    first = {alike(job.grid.cells[0].experiment): job for job in reversed(jobs)}
    for wave in (list(first.values()), [job for job in jobs if job not in first.values()]):
        for job, seconds in zip(wave, workers.map(_make, wave), strict=True):
            if done is not None:
                done(job.grid.cells[0], seconds)
