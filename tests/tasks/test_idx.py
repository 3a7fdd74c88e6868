from __future__ import annotations

import gzip
import io
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedveil.errors import FedveilError
from fedveil.tasks.formats.idx import TYPES, read_idx

from .conftest import idx_bytes

IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
GOOD = idx_bytes(IMAGES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "values-idx3-ubyte"


@settings(max_examples=60, deadline=None)
@given(
    values=st.sampled_from(sorted(TYPES.values())).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(max_dims=4, max_side=5))
    ),
    packed=st.booleans(),
)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, values: np.ndarray, packed: bool) -> None:
    path = tmp_path_factory.mktemp("idx") / "file"  # the name says nothing of gzip
    path.write_bytes(gzip.compress(idx_bytes(values)) if packed else idx_bytes(values))
    read = read_idx(path, (None,) * values.ndim, values.dtype.name)
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "content, line",
    [
        (b"", "not an IDX file: it starts with nothing, expected 00000803"),
        (b"\0\0\x08", "not an IDX file"),
        (b"\x89PNG" + GOOD, "starts with 89504e47"),
        (b"\0\0\x07" + GOOD[3:], "not an IDX file"),
        (b"\0\0\x08\0", "not an IDX file"),
        (GOOD[:9], "cut short inside its header"),
        (GOOD[:-1], "cut short"),
        (GOOD + b"\0", "bytes after the 60"),
        (idx_bytes(IMAGES.astype(np.float32)), "holds float32 values, expected uint8"),
        (idx_bytes(IMAGES[0]), "has 2 dimensions, expected 3 .N × 4 × 5"),
        (idx_bytes(IMAGES.reshape(3, 5, 4)), "holds 3 × 5 × 4 values, expected N × 4 × 5"),
        (idx_bytes(IMAGES[:0]), "holds 0 × 4 × 5 values"),
        (GOOD[:4] + struct.pack(">3I", 2**32 - 1, 4, 5) + GOOD[16:], "promises 85,899,345,900 bytes"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(path: Path, pack: object, content: bytes, line: str) -> None:
    path.write_bytes(pack(content))  # type: ignore[operator]
    with pytest.raises(FedveilError, match=line) as caught:
        read_idx(path, (None, 4, 5))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, len(gzip.compress(GOOD)) - 1))
def test_a_gzip_file_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(gzip.compress(GOOD)[:cut])
    with pytest.raises(FedveilError, match=r"cut short|not an IDX file"):
        read_idx(path, (None, 4, 5))


def test_a_flipped_bit_fails_the_checksum(path: Path) -> None:
    content = bytearray(gzip.compress(GOOD, compresslevel=0))
    content[-20] ^= 1  # among the values, which are stored unpacked at level 0
    path.write_bytes(content)
    with pytest.raises(FedveilError, match="damaged"):
        read_idx(path, (None, 4, 5))


@pytest.mark.parametrize("promised", [1, 4_000_000])
def test_a_gzip_bomb_takes_no_memory(path: Path, promised: int) -> None:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        file.write(b"\0\0\x08\x03" + struct.pack(">3I", promised, 4, 5))
        for _ in range(30):
            file.write(bytes(2**20))
    path.write_bytes(packed.getvalue())  # 30 kB that unpack to 30 MB
    tracemalloc.start()
    with pytest.raises(FedveilError, match=r"bytes after|more than it can hold"):
        read_idx(path, (None, 4, 5))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_lying_plain_header_takes_no_memory(path: Path) -> None:
    path.write_bytes(GOOD[:4] + struct.pack(">3I", 50_000_000, 4, 5) + GOOD[16:])
    tracemalloc.start()
    with pytest.raises(FedveilError, match="more than it can hold"):
        read_idx(path, (None, 4, 5))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_missing_file_and_a_folder_are_said(path: Path) -> None:
    with pytest.raises(FedveilError, match=r"cannot read .*No such file"):
        read_idx(path, (None,))
    with pytest.raises(FedveilError, match=r"cannot read .*directory"):
        read_idx(path.parent, (None,))
