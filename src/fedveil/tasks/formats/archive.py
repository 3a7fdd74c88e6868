"""Tar archives, unpacked so that nothing leaves the folder and sizes are bounded."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from fedveil.errors import FedveilError

LIMIT = 2**31  # bytes of all files together; CIFAR's archives unpack to 186 MB
ENTRIES = 10_000
BLOCK = 2**20


def unpack(archive: Path, folder: Path, limit: int = LIMIT) -> list[Path]:
    """Unpack the plain files of a `.tar.gz` into the folder; returns where they are.

    An archive with absolute paths, `..`, links or devices is refused; the caller has to remove what was unpacked
    before that.
    """
    found: list[Path] = []
    total = 0
    try:
        with gzip.open(archive) as unzipped, tarfile.open(fileobj=_Careful(unzipped), mode="r:") as tar:  # type: ignore[call-overload]
            for count, member in enumerate(tar, 1):
                target = folder / _inside(archive, member)
                total += member.size
                if total > limit or count > ENTRIES:
                    raise FedveilError(f"{archive}: unpacks to more than {limit:,} bytes or {ENTRIES:,} files: refused")
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None  # of a plain file
                with target.open("xb") as file:
                    shutil.copyfileobj(content, file, BLOCK)
                found.append(target)
    except FileExistsError as error:
        raise FedveilError(f"{archive}: holds the same file twice: {error.filename}") from None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        # A ValueError is an invalid number in a header.
        shown = str(error)[:100]
        raise FedveilError(f"{archive}: cut short or damaged, or not a .tar.gz file ({shown}); get it again") from None
    except OSError as error:
        raise FedveilError(f"cannot unpack {archive}: {error.strerror or error}") from None
    return found


def _inside(archive: Path, member: tarfile.TarInfo) -> PurePosixPath:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or ":" in member.name or "\0" in member.name:
        raise FedveilError(f"{archive}: an entry leaves its folder: {member.name!r:.80}; nothing of it is used")
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise FedveilError(f"{archive}: {member.name!r:.80} is not a plain file; nothing of the archive is used")
    if not name.parts and not member.isdir():  # the folder itself
        raise FedveilError(f"{archive}: a file has no name; nothing of the archive is used")
    return name


class _Careful:
    """A file that refuses to read much at once, so that headers with long names cannot take all memory."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        """As for any file, up to a bound."""
        if not 0 <= size <= BLOCK:
            raise tarfile.ReadError("a header is too long")
        content: bytes = self._file.read(size)
        return content

    def seek(self, position: int, whence: int = 0) -> int:
        """As for any file."""
        return int(self._file.seek(position, whence))

    def tell(self) -> int:
        """As for any file."""
        return int(self._file.tell())
