"""Files that are written completely or not at all, and the folders that they go to."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from fedveil.errors import FedveilError, shortened

if sys.platform != "win32":
    import fcntl

PART = ".fedveil-part"  # ending of the name of an unfinished file


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the old content or the new, never a part, even if the writer is killed.

    Removes what killed writers left in the folder.
    """
    temporary = None
    try:
        remove_leftovers(path.parent)
        descriptor, temporary = _new_part(path)
        with open(descriptor, "wb") as file:  # keeps its lock until it is closed, under its new name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
    except BaseException as error:  # an interrupt from the keyboard must not leave anything behind either
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FedveilError(f"cannot write {path}: {error.strerror}") from None
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of dead writers: a living one, in any process, holds a lock on its file."""
    with os.scandir(folder) as entries:
        parts = [entry.path for entry in entries if entry.name.startswith(".") and entry.name.endswith(PART)]
    for part in parts:
        try:
            descriptor = os.open(part, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        except OSError:  # finished in the meantime, or another user's
            continue
        try:
            if _locked(descriptor, wait=False):
                os.unlink(part)
        except FileNotFoundError:
            pass
        finally:
            os.close(descriptor)


def _new_part(path: Path) -> tuple[int, Path]:
    """A new unfinished file, locked by this writer."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PART, dir=path.parent)
        _locked(descriptor, wait=True)
        if os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        os.close(descriptor)  # another writer took it for a leftover before it could be locked


def _locked(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file; whether that worked."""
    if sys.platform == "win32":  # no way to tell a dead writer's file from a living one's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # somebody has it, or this file system has no locks
        return False
    return True


def writable_folder(path: Path) -> Path:
    """Make an output folder and check that it can be written to, before any long work starts."""
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


def private_folder(path: Path) -> Path:
    """Make a folder that only this user may enter (mode 0700), or take that right from others where it exists."""
    writable_folder(path)
    try:
        path.chmod(0o700)
    except OSError as error:
        raise FedveilError(f"cannot make {_shown(path)} private: {error.strerror}; choose another folder") from None
    return path


def _shown(path: Path) -> str:
    return shortened(str(path), 120)
