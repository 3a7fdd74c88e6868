"""One run at a time writes to a folder. The kernel holds the lock, so that of a process that died is gone with it."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fedveil.errors import FedveilError
from fedveil.files import remove_leftovers, writable_folder

LOCK = ".fedveil.lock"  # who has the folder, as a line of text

_log = logging.getLogger("fedveil.ownership")
_UNABLE = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # what file systems without locks answer


class InUse(FedveilError):
    """Another run has the folder."""


@contextmanager
def owned(folder: Path | str | None) -> Iterator[None]:
    """While the block runs, the folder is this thread's, which may take it again. All others are refused in one line.

    What a killed run left half-written is removed. A folder that was made here and stayed empty goes at the end.
    """
    if folder is None:
        yield
        return
    folder = Path(folder)
    missing = _missing(folder)
    path = writable_folder(folder).absolute() / LOCK
    # One object for each path and thread: it counts how often it was taken.
    lock = FileLock(path, blocking=False, is_singleton=True, fallback_to_soft=False)
    first = not lock.is_locked
    try:
        lock.acquire()
    except Timeout:
        raise InUse(
            f"{folder} is in use by {_owner(path)}: wait until it is done, stop it, or choose another folder"
        ) from None
    except OSError as error:
        if error.errno not in _UNABLE:
            raise FedveilError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None
        _log.warning("%s is on a file system without locks: see to it that no other run writes there", folder)
        yield
        return
    try:
        if first:
            path.write_text(_this_process(), encoding="utf-8")
            _tidy(path.parent)
        yield
    finally:
        if first:
            _tidy(path.parent)  # a signal may come before a file's writer knows its name
            path.unlink(missing_ok=True)  # before it is released: whoever waits for this very file is then refused
        lock.release()
        for each in missing:
            with suppress(OSError):  # not empty
                each.rmdir()


def _tidy(folder: Path) -> None:
    """Remove what killed writers left in the folder and directly below."""
    for each in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        remove_leftovers(each)


def _missing(folder: Path) -> list[Path]:
    """The folders that have to be made, from the inside to the outside."""
    try:
        return [each for each in (folder, *folder.parents) if not each.exists()]
    except (OSError, ValueError):
        return []  # it cannot be made at all


def _this_process() -> str:
    program, *arguments = sys.argv or [""]
    command = shlex.join([Path(program).name or "python", *arguments])
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    shown = command if len(command) <= 160 else f"{command[:160]}…"
    return f"`{shown}` (process {os.getpid()}, since {since})"


def _owner(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"  # it has just let go
