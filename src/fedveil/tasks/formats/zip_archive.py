"""Files from a zip archive: only those asked for by name, within a bound."""

from __future__ import annotations

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from fedveil.errors import FedveilError

LIMIT = 2**28  # bytes of all files together; the largest set here unpacks to 13 MB
BLOCK = 2**20


@contextlib.contextmanager
def opened_zip(path: Path, kind: str, doing: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive; raises errors of one line, in which `kind` is "an .npz file" and `doing` is "read"."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, ValueError) as error:
        # A ValueError is a name that is not text, or an offset before the start.
        shown = str(error)[:100]
        raise FedveilError(f"{path}: cut short or damaged, or not {kind} ({shown}); get it again") from None
    except (NotImplementedError, RuntimeError) as error:  # an unknown compression, a password
        raise FedveilError(f"{path}: cannot unpack: {error}") from None
    except OSError as error:
        raise FedveilError(f"cannot {doing} {path}: {error.strerror or error}") from None


def plainly_packed(info: zipfile.ZipInfo) -> bool:
    """Whether a member is stored or deflated: other methods allocate as much memory as a number in the file says."""
    return info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def unpack_zip(archive: Path, folder: Path, members: Sequence[str], limit: int = LIMIT) -> list[Path]:
    """Unpack these members into the folder, each under the last part of its name; ignore the others.

    Sizes are counted while unpacking, whatever the archive says.
    """
    found = []
    room = limit
    with opened_zip(archive, "a .zip file", "unpack") as file:
        for name in members:
            try:
                info = file.getinfo(name)
            except KeyError:
                raise FedveilError(f"{archive}: does not hold {name}; get it again") from None
            if not plainly_packed(info):
                raise FedveilError(f"{archive}: {name} is packed in an unusual way; get it again")
            content = file.open(info)
            target = folder / PurePosixPath(name).name
            with content, target.open("xb") as out:
                while block := content.read(BLOCK):
                    room -= len(block)
                    if room < 0:
                        raise FedveilError(f"{archive}: unpacks to more than {limit:,} bytes: refused")
                    out.write(block)
            found.append(target)
    return found
