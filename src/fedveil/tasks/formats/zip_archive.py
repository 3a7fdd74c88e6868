"""Files out of a zip archive: those that are asked for by name, within a bound."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fedveil.errors import FedveilError

LIMIT = 2**28  # bytes of all files together; the largest set here unpacks to 13 MB
BLOCK = 2**20


def unpack_zip(archive: Path, folder: Path, members: Sequence[str], limit: int = LIMIT) -> list[Path]:
    """Unpack these members into the folder, each under its last name; nothing else of the archive is looked at.

    Sizes are counted as they come, whatever the archive says of them.
    """
    found = []
    room = limit
    try:
        with zipfile.ZipFile(archive) as file:
            for name in members:
                try:
                    info = file.getinfo(name)
                except KeyError:
                    raise FedveilError(f"{archive}: does not hold {name}; get it again") from None
                # The other methods take as much memory as a number in the file says.
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
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
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, ValueError) as error:
        shown = str(error)[:100]
        raise FedveilError(f"{archive}: cut short or damaged, or not a .zip file ({shown}); get it again") from None
    except (NotImplementedError, RuntimeError) as error:  # an unknown compression, a password
        raise FedveilError(f"{archive}: cannot unpack: {error}") from None
    except OSError as error:
        raise FedveilError(f"cannot unpack {archive}: {error.strerror or error}") from None
    return found
