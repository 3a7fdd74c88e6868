"""Arrays in `.npz` files (a zip of `.npy` files), of whole numbers only and never as pickles."""

from __future__ import annotations

import ast
import math
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import FedveilError
from fedveil.tasks.formats.zip_archive import opened_zip, plainly_packed

LIMIT = 2**31  # bytes of one array; TissueMNIST, the largest set, has 130 MB
BLOCK = 2**22
HEADER = 4096  # bytes; headers in use have about a hundred
RATIO = 1032  # deflate cannot shrink by more than this


def read_npz(path: Path, shapes: dict[str, tuple[int | None, ...]]) -> dict[str, NDArray[Any]]:
    """The named arrays; each must hold whole numbers of 8 to 64 bits in the shape given, `None` for any length.

    What a header promises is compared with the size of its file before memory is allocated.
    """
    with opened_zip(path, "an .npz file", "read") as archive:
        return {name: _member(archive, path, name, shape) for name, shape in shapes.items()}


def _member(archive: zipfile.ZipFile, path: Path, name: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    where = f"{path} ({name})"
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        there = ", ".join(f"{each.removesuffix('.npy')!r:.40}" for each in archive.namelist()[:12]) or "nothing"
        raise FedveilError(f"{path}: has no array {name}; it holds {there}") from None
    if not plainly_packed(info):
        raise FedveilError(f"{where}: packed in a way that numpy does not use; get it again")
    with archive.open(info) as file:
        kind, fortran, found, header = _header(file, where)
        wanted = " × ".join("N" if length is None else str(length) for length in shape)
        fits = len(found) == len(shape) and all(w in (None, f) for w, f in zip(shape, found, strict=True))
        if not fits or 0 in found:
            raise FedveilError(f"{where}: holds {' × '.join(map(str, found)) or 'one value'}, expected {wanted}")
        if kind.kind not in "ui":
            raise FedveilError(f"{where}: holds {kind} values, expected whole numbers")
        needed = math.prod(found) * kind.itemsize
        if needed > LIMIT:
            raise FedveilError(f"{where}: promises {needed:,} bytes of data, more than the {LIMIT:,} allowed")
        if header + needed != info.file_size or needed > info.compress_size * RATIO:
            raise FedveilError(f"{where}: promises {needed:,} bytes of data and does not hold them; get it again")
        content = np.empty(needed, dtype=np.uint8)
        filled = 0
        while filled < needed and (block := file.read(min(needed - filled, BLOCK))):
            content[filled : filled + len(block)] = np.frombuffer(block, np.uint8)
            filled += len(block)
        if filled != needed or file.read(1):  # reading to the end also compares the checksum
            raise FedveilError(f"{where}: promises {needed:,} bytes of data and has {filled:,}; get it again")
    values = content.view(kind).reshape(found, order="F" if fortran else "C")
    return values.astype(kind.newbyteorder("="), copy=False)


def _header(file: IO[bytes], where: str) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """Type, order, shape, and how many bytes the header takes."""
    start = file.read(8)
    if len(start) < 8 or start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
        raise FedveilError(f"{where}: not an array: it starts with {start.hex() or 'nothing'}, expected 934e554d5059")
    width = 2 if start[6] == 1 else 4
    (length,) = struct.unpack("<H" if width == 2 else "<I", file.read(width))
    if length > HEADER:
        raise FedveilError(f"{where}: its header has {length:,} bytes, more than the {HEADER:,} allowed")
    text = file.read(length)
    try:
        header = ast.literal_eval(text.decode("utf-8").strip())
        shape, fortran, kind = header["shape"], header["fortran_order"], header["descr"]
        if "O" in str(kind):
            raise FedveilError(f"{where}: holds Python objects, which are never read; expected whole numbers")
        if not isinstance(kind, str) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError
        return np.dtype(kind), bool(fortran), tuple(shape), 8 + width + len(text)
    except (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError):
        raise FedveilError(f"{where}: its header is damaged; get it again") from None
