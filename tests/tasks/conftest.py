"""Small IDX files that stand in for MNIST, and the real files where this checkout has them beside it."""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

REPOSITORY = Path(__file__).parents[2]


def idx_bytes(values: NDArray[np.generic]) -> bytes:
    """An array as an IDX file: written here on its own, so that reader and writer cannot share a mistake."""
    codes = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}
    header = bytes([0, 0, codes[values.dtype.name], values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(values.dtype.newbyteorder(">")).tobytes()


@pytest.fixture
def write_mnist() -> Callable[..., Path]:
    """Writes a tiny set in the files of MNIST into a folder."""

    def write(folder: Path, train: int = 40, test: int = 10, seed: int = 0, **changed: NDArray[np.generic]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(seed)
        arrays = {
            "train-images-idx3-ubyte": random.integers(0, 256, (train, 28, 28), dtype=np.uint8),
            "train-labels-idx1-ubyte": np.arange(train, dtype=np.uint8) % 10,
            "t10k-images-idx3-ubyte": random.integers(0, 256, (test, 28, 28), dtype=np.uint8),
            "t10k-labels-idx1-ubyte": np.arange(test, dtype=np.uint8) % 10,
        }
        for stem, values in arrays.items():
            key = stem.partition("-idx")[0].replace("-", "_")
            (folder / f"{stem}.gz").write_bytes(gzip.compress(idx_bytes(changed.get(key, values))))
        return folder

    return write


@pytest.fixture
def real_data() -> Path:
    """The folder with the real benchmark data, or a skip."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not (folder / "mnist").is_dir():
        pytest.skip("the real benchmark data is not beside this checkout")
    return folder


def png_bytes(pixels: NDArray[np.generic]) -> bytes:
    """An array (H, W) or (H, W, 3) as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def real_cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real CIFAR-10 in the files it is distributed in (three training batches), or a skip."""
    prepare = REPOSITORY.parent / "shared" / "data" / "prepare"
    if not prepare.is_file():
        pytest.skip("the real benchmark data is not beside this checkout")
    folder = tmp_path_factory.mktemp("prepared")
    subprocess.run([sys.executable, prepare, folder, "cifar10"], check=True, capture_output=True)
    return folder
