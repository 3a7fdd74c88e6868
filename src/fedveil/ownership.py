"""Folders that one run at a time writes to. The kernel holds the locks: those of a process that died are free."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from fedveil.errors import FedveilError, shortened
from fedveil.files import remove_leftovers, writable_folder

LOCK = ".fedveil.lock"  # a line of text that says who has the folder

_log = logging.getLogger("fedveil.ownership")
_UNABLE = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # the answers of file systems without locks


class InUse(FedveilError):
    """Another run has the folder."""


@contextmanager
def owned(folder: Path | str | None) -> Iterator[None]:
    """While the block runs, the folder belongs to this thread, which may take it again. Others get an `InUse` error.

    Removes what killed runs left half-written and, in the end, a folder that was made here and stayed empty.
    """
    if folder is None:
        yield
        return
    folder = Path(folder)
    missing = _missing(folder)
    path = writable_folder(folder).absolute() / LOCK
    try:
        lock = _acquire(path, wait=False)
    except Timeout:
        raise InUse(
            f"{folder} is in use by {_owner(path)}: wait until it is done, stop it, or choose another folder"
        ) from None
    try:
        with _held(lock, path) as outermost:
            try:
                if outermost:
                    _tidy(path.parent)
                yield
            finally:
                if outermost:
                    _tidy(path.parent)  # a signal may come before a file's writer knows its name
    finally:
        for each in missing:
            with suppress(OSError):  # not empty
                each.rmdir()


@contextmanager
def leased(path: Path, on_wait: Callable[[str], None] | None = None, *, wait: bool = True) -> Iterator[None]:
    """While the block runs, this thread alone has the lease with the lock file `path`. Waits for whoever has it now.

    Without `wait`, whoever has it now is told by an `InUse` error.

    For work that several processes might do at once: look inside the block whether another has done it meanwhile.

    on_wait: is told who has the lease before the waiting starts.
    """
    try:
        lock = _acquire(path, wait=False)
    except Timeout:
        if not wait:
            raise InUse(f"{path.stem} is in use by {_owner(path)}") from None
        if on_wait:
            on_wait(_owner(path))
        lock = _acquire(path, wait=True)
    with _held(lock, path):
        yield


def _acquire(path: Path, *, wait: bool) -> BaseFileLock | None:
    """Take a lock; raises `Timeout` if another has it and `wait` is not set. None on a file system without locks."""
    # One object per path, which counts for each thread how often it was taken.
    lock = FileLock(path, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise
    except OSError as error:
        if error.errno not in _UNABLE:
            raise FedveilError(f"cannot write to {path.parent}: {error.strerror}; choose another folder") from None
        _log.warning("%s is on a file system without locks: make sure that no other run writes there", path.parent)
        return None
    return lock


@contextmanager
def _held(lock: BaseFileLock | None, path: Path) -> Iterator[bool]:
    """Write into the lock's file who has it, and in the end give the lock back; yields whether it was taken afresh."""
    if lock is None:
        yield False
        return
    outermost = lock.lock_counter == 1
    try:
        if outermost:
            path.write_text(_this_process(), encoding="utf-8")
        yield outermost
    finally:
        if outermost:
            path.unlink(missing_ok=True)  # before the release: whoever gets the lock of a removed file tries again
        lock.release()


def _tidy(folder: Path) -> None:
    """Remove what killed writers left in the folder and in those directly below."""
    for each in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        remove_leftovers(each)


def _missing(folder: Path) -> list[Path]:
    """The folders that do not exist yet, innermost first."""
    try:
        return [each for each in (folder, *folder.parents) if not each.exists()]
    except (OSError, ValueError):
        return []  # it cannot be made


def _this_process() -> str:
    program, *arguments = sys.argv or [""]
    command = shlex.join([Path(program).name or "python", *arguments])
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return f"`{shortened(command, 160)}` (process {os.getpid()}, since {since})"


def _owner(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"  # it has just let go
