"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fedveil.errors import FedveilError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, also after a kill, finds the old content or the new, never a part."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
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


def writable_folder(path: Path) -> Path:
    """Make an output folder and make sure that it can be written to, before any long work starts."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise FedveilError(f"cannot write to {path}: {error.strerror}; choose another folder with --out") from None
    return path
