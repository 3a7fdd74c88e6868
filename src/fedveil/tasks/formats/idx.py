"""IDX files, the format of MNIST and its kin: a header with type and dimensions, then the values.

Bytes 0 and 1 are zero, byte 2 is the type, byte 3 the number of dimensions; then one big-endian uint32 per
dimension, then the values, big-endian, last dimension fastest.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import FedveilError

TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
GZIP_MAGIC = b"\x1f\x8b"
GZIP_RATIO = 1032  # deflate cannot shrink by more than this
LIMIT = 2**31  # bytes; the largest IDX set in use (EMNIST by class) has a quarter of this


@contextlib.contextmanager
def maybe_gzipped(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file, unpacking gzip; yields it with the most bytes it can hold. Raises errors of one line."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            packed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if not packed:
                yield file, size
                return
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(BinaryIO, unpacked), size * GZIP_RATIO
    except EOFError:
        raise FedveilError(f"{path}: the gzip file is cut short; get it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FedveilError(f"{path}: the gzip file is damaged ({error}); get it again") from None
    except OSError as error:
        raise FedveilError(f"cannot read {path}: {error.strerror or error}") from None


def read_idx(path: Path, shape: tuple[int | None, ...], dtype: str = "uint8") -> NDArray[Any]:
    """The array in an IDX file, plain or gzipped (told apart by content, not by name).

    `shape` is what the file must hold, `None` where any length will do: `(None, 28, 28)` for MNIST's images. Anything
    else, and a file that is too short or too long by a byte, is a `FedveilError`. The header is checked against the
    size of the file before memory is allocated, and no more is unpacked than the header promises.
    """
    with maybe_gzipped(path) as (file, room):
        return _read(file, path, shape, dtype, room)


def _read(file: BinaryIO, path: Path, shape: tuple[int | None, ...], dtype: str, room: int) -> NDArray[Any]:
    dimensions = _header(file, path, shape, dtype)
    kind = np.dtype(dtype).newbyteorder(">")
    needed = math.prod(dimensions) * kind.itemsize
    start = 4 + 4 * len(dimensions)
    if needed > LIMIT:
        raise FedveilError(f"{path}: its header promises {needed:,} bytes of data, more than the {LIMIT:,} allowed")
    if start + needed > room:
        raise FedveilError(f"{path}: cut short: its header promises {needed:,} bytes of data, more than it can hold")
    values = np.empty(needed, dtype=np.uint8)
    filled = 0
    while filled < needed:
        got = file.readinto(values[filled:].data)  # type: ignore[attr-defined]
        if not got:
            raise FedveilError(f"{path}: cut short: its header promises {needed:,} bytes of data and it has {filled:,}")
        filled += got
    # Reading past the end also makes gzip compare its checksum.
    if file.read(1):
        raise FedveilError(f"{path}: has bytes after the {needed:,} that its header promises; get it again")
    return values.view(kind).reshape(dimensions).astype(dtype, copy=False)


def _header(file: BinaryIO, path: Path, shape: tuple[int | None, ...], dtype: str) -> tuple[int, ...]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or magic[3] == 0:
        expected = f"0000{_code(dtype):02x}{len(shape):02x}"
        raise FedveilError(f"{path}: not an IDX file: it starts with {magic.hex() or 'nothing'}, expected {expected}")
    if TYPES[magic[2]] != dtype:
        raise FedveilError(f"{path}: holds {TYPES[magic[2]]} values, expected {dtype}")
    wanted = " × ".join("N" if length is None else str(length) for length in shape)
    if magic[3] != len(shape):
        raise FedveilError(f"{path}: has {magic[3]} dimensions, expected {len(shape)} ({wanted})")
    lengths = file.read(4 * len(shape))
    if len(lengths) < 4 * len(shape):
        raise FedveilError(f"{path}: cut short inside its header")
    dimensions = struct.unpack(f">{len(shape)}I", lengths)
    fits = all(want is None or want == got for want, got in zip(shape, dimensions, strict=True))
    if not fits or 0 in dimensions:
        found = " × ".join(map(str, dimensions))
        raise FedveilError(f"{path}: holds {found} values, expected {wanted}")
    return dimensions


def _code(dtype: str) -> int:
    return next(code for code, name in TYPES.items() if name == dtype)
