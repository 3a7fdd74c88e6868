"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from fedveil.errors import FedveilError

if sys.platform != "win32":
    import fcntl

PART = ".fedveil-part"  # how the name of a file ends that is not whole yet


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, also after a kill, finds the old content or the new, never a part.

    What writers that were killed left in the folder is removed.
    """
    temporary = None
    try:
        remove_leftovers(path.parent)
        descriptor, temporary = _new_part(path)
        with open(descriptor, "wb") as file:  # holds its lock until it is closed, behind its new name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
    except BaseException as error:  # also an interrupt from the keyboard leaves nothing behind
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FedveilError(f"cannot write {path}: {error.strerror}") from None
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of writers that are dead: a living one, of whichever process, holds a lock on its."""
    with os.scandir(folder) as entries:
        parts = [entry.path for entry in entries if entry.name.startswith(".") and entry.name.endswith(PART)]
    for part in parts:
        try:
            descriptor = os.open(part, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        except OSError:  # finished meanwhile, or another user's
            continue
        try:
            if _locked(descriptor, wait=False):
                os.unlink(part)
        except FileNotFoundError:
            pass
        finally:
            os.close(descriptor)


def _new_part(path: Path) -> tuple[int, Path]:
    """An unfinished file under its writer's lock."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PART, dir=path.parent)
        _locked(descriptor, wait=True)
        if os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        os.close(descriptor)  # another writer took it for a leftover before it was locked


def _locked(descriptor: int, *, wait: bool) -> bool:
    """Take the lock on an open file, if it can be had."""
    if sys.platform == "win32":  # where a dead writer's file cannot be told from a living one's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # somebody has it, or this file system knows no locks
        return False
    return True


def writable_folder(path: Path) -> Path:
    """Make an output folder and make sure that it can be written to, before any long work starts."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror
        if isinstance(error, FileExistsError):
            obstacle = Path(error.filename)
            reason = f"{obstacle.name} is a {'link that leads nowhere' if obstacle.is_symlink() else 'file'}"
        raise FedveilError(f"cannot write to {_shown(path)}: {reason}; choose another folder with --out") from None
    except ValueError as error:  # a NUL in its name
        raise FedveilError(f"cannot write to {_shown(path)}: {error}; choose another folder with --out") from None
    return path


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 120 else f"{text[:120]}…"
