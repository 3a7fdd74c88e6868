"""The readers of data sets: IDX, CIFAR's pickles, npz, pictures, tables, archives."""

from __future__ import annotations

import functools
import gzip
import io
import pickle
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from numpy.typing import NDArray
from PIL import Image

from fedveil.registry import datasets
from fedveil.tasks.datasets.base import LoadedData
from fedveil.tasks.formats.archive import unpack
from fedveil.tasks.formats.idx import read_idx
from fedveil.tasks.formats.pictures import read_picture
from fedveil.tasks.image_files import ImageFiles
from fuzz.mutate import NUMBERS, any_of, damaged, odd_lines
from fuzz.reader import Files, Reader
from fuzz.structures import HUGE, odd_png, pickle_files, tar_gz_files, zips

BYTES = (np.arange(10_000) * 37 % 251).astype(np.uint8)


def _under(name: str, content: bytes) -> Files:
    return {name: content}


def _ending(ending: str, content: bytes) -> tuple[str, bytes]:
    return ending, content


def _pixels(*shape: int) -> NDArray[np.uint8]:
    return np.resize(BYTES, shape)


def one_of_them(valid: Files, mutated: dict[str, Callable[[], SearchStrategy[bytes]]]) -> SearchStrategy[Files]:
    """A set of files of which one is mutated or missing."""

    def choose(name: str) -> SearchStrategy[Files]:
        return mutated[name]().map(lambda content: {**valid, name: content})

    removed = st.sampled_from(sorted(mutated)).map(lambda name: {n: c for n, c in valid.items() if n != name})
    return st.one_of(*(choose(name) for name in mutated), *(choose(name) for name in mutated), removed)


def load_set(name: str, folder: Path, **fields: Any) -> LoadedData:
    """Load a data set as a task does, with its hash and with pictures that would be read later."""
    data: LoadedData = datasets.build(name, **fields).load(folder)
    assert data.sha256
    for part in data.parts.values():
        if isinstance(part.images, ImageFiles):
            for place in range(len(part)):
                part.images.read(place)
    return data


# ---- IDX -----------------------------------------------------------------------------------------------------


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    """An IDX file of bytes."""
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


@st.composite
def _odd_idx(draw: DrawFn, values: NDArray[np.uint8]) -> bytes:
    """A header with other dimensions than the data has, and data of other lengths."""
    kind = draw(st.sampled_from((8, 8, 8, 9, 0x0B, 0x0D, 0x0E, 0)))
    numbers = [draw(st.sampled_from((length, length, *(n % 2**32 for n in NUMBERS)))) for length in values.shape]
    content = draw(st.sampled_from((values.tobytes(), values.tobytes() * 2, b"", b"\0" * HUGE)))
    return struct.pack(f">4B{values.ndim}I", 0, 0, kind, values.ndim, *numbers) + content


def idx_files(values: NDArray[np.uint8]) -> SearchStrategy[bytes]:
    """Plain and gzipped files like that of these values."""
    plain = st.one_of(_odd_idx(values), damaged(idx_bytes(values)))
    return any_of(plain, plain.map(lambda content: gzip.compress(content, mtime=0)))


def _idx() -> SearchStrategy[Files]:
    return idx_files(_pixels(3, 5, 4)).map(lambda content: {"images": content})


def _mnist() -> SearchStrategy[Files]:
    arrays = {
        "train-images-idx3-ubyte": _pixels(3, 28, 28),
        "train-labels-idx1-ubyte": np.array([0, 9, 4], np.uint8),
        "t10k-images-idx3-ubyte": _pixels(2, 28, 28),
        "t10k-labels-idx1-ubyte": np.array([1, 2], np.uint8),
    }
    valid = {name: idx_bytes(values) for name, values in arrays.items()}
    return one_of_them(valid, {name: partial(idx_files, values) for name, values in arrays.items()})


# ---- CIFAR ---------------------------------------------------------------------------------------------------


def cifar_batch(key: bytes, count: int) -> dict[Any, Any]:
    """What a batch of CIFAR holds."""
    return {
        b"batch_label": b"x",
        key: list(range(count)),
        b"data": _pixels(count, 3072),
        b"filenames": [b"a.png"] * count,
    }


def _pickled(values: dict[str, dict[Any, Any]]) -> SearchStrategy[Files]:
    valid = {name: pickle.dumps(value, 2) for name, value in values.items()}
    return one_of_them(valid, {name: partial(pickle_files, value) for name, value in values.items()})


def _cifar10() -> SearchStrategy[Files]:
    names = ("data_batch_1", "test_batch")
    return _pickled({f"cifar-10-batches-py/{name}": cifar_batch(b"labels", 1) for name in names})


def _cifar100() -> SearchStrategy[Files]:
    values = {f"cifar-100-python/{name}": cifar_batch(b"fine_labels", 1) for name in ("train", "test")}
    names = [f"class {number}".encode() for number in range(100)]
    return _pickled({**values, "cifar-100-python/meta": {b"fine_label_names": names, b"coarse_label_names": []}})


ENTRIES = {"set/test_batch": b"x" * 600, "set/data_batch_1": b"y" * 20, "set/readme.html": b""}


def _archive() -> SearchStrategy[Files]:
    return tar_gz_files(ENTRIES).map(lambda content: {"set.tar.gz": content})


# ---- npz -----------------------------------------------------------------------------------------------------

HEADERS = (
    *(
        "{'descr': '|O', 'fortran_order': False, 'shape': (2, 1), }",
        "{'descr': '|u1'}",
        "{}",
        "[1]",
        "0",
        "",
        "('" * 50,
    ),
    *(
        "{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 1), }",
        "(" * 3000,
        "-" * 3900,
        "[" * 80 + "]" * 80,
    ),
    *(
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 1), }",
        "{'descr': '|u1', 'fortran_order': 0, 'shape': 2}",
    ),
    *(
        "{'descr': '<f8', 'fortran_order': True, 'shape': (2, 1), }",
        "{'descr': 'V0', 'fortran_order': 0, 'shape': (2, 1)}",
    ),
    *(
        "{'descr': '|u1', 'fortran_order': 0, 'shape': (True, True)}",
        "{'descr': '<u0', 'fortran_order': 0, 'shape': (2, 1)}",
    ),
    *(
        "{'descr': 'u1,u1', 'fortran_order': 0, 'shape': (2, 1)}",
        "{'descr': '2u1', 'fortran_order': 0, 'shape': (2, 1)}",
    ),
    *(
        "{'descr': '(9,9,9,9,9)u8', 'fortran_order': 0, 'shape': (2, 1)}",
        "{'descr': 'm8[s]', 'fortran_order': 0, 'shape': (1,)}",
    ),
    *(
        "__import__('os').system('touch ../../x')",
        "{'descr': 'x', 'shape': ('a',), 'fortran_order': 1}",
        "{1: {2: {}}}",
    ),
    *(
        "{'descr': '<m', 'fortran_order': {}, 'shape': {}}",
        "{'descr': '|u1', 'fortran_order': 0, 'shape': (10**9, 10)}",
    ),
    "{'descr': '|u1', 'fortran_order': False, 'shape': (" + "9" * 4000 + ", 1)}",
)


def npy_bytes(values: NDArray[Any]) -> bytes:
    """A `.npy` file."""
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


@st.composite
def _odd_npy(draw: DrawFn, values: NDArray[Any]) -> bytes:
    """Another header before the data, or objects, which are pickles."""
    if draw(st.integers(0, 5)) == 0:
        file = io.BytesIO()
        np.save(file, np.array([[object]], dtype=object), allow_pickle=True)
        return file.getvalue()
    text = draw(st.sampled_from(HEADERS)).encode()
    version = draw(st.sampled_from((1, 2, 3, 9)))
    length = struct.pack("<H" if version == 1 else "<I", draw(st.sampled_from((len(text), len(text), 0, 65535))))
    content = draw(st.sampled_from((values.tobytes(), b"", b"\0" * HUGE)))
    return b"\x93NUMPY" + bytes((version, 0)) + length + text + content


def npz_files(arrays: dict[str, NDArray[Any]]) -> SearchStrategy[bytes]:
    """Zips of arrays like these. Most entries are valid, so that most files are read to a late one."""
    plain = {f"{name}.npy": npy_bytes(values) for name, values in arrays.items()}
    odd: dict[str, SearchStrategy[bytes]] = {}
    for name, values in arrays.items():
        same = st.just(plain[f"{name}.npy"])
        odd[f"{name}.npy"] = st.one_of(same, same, same, same, same, _odd_npy(values), damaged(plain[f"{name}.npy"]))
    valid = zips({name: st.just(content) for name, content in plain.items()})
    return any_of(zips(odd), valid)


def _medmnist() -> SearchStrategy[Files]:
    sets = {
        "pneumoniamnist": ((28, 28), 1, np.uint8),
        "pathmnist": ((28, 28, 3), 1, np.int64),
        "chestmnist": ((28, 28), 14, np.uint8),
    }
    choices = []
    for name, (shape, width, kind) in sets.items():
        arrays: dict[str, NDArray[Any]] = {}
        for part in ("train", "val", "test"):
            arrays[f"{part}_images"] = _pixels(2, *shape)
            arrays[f"{part}_labels"] = np.ones((2, width), kind)
        choices.append(npz_files(arrays).map(partial(_under, f"{name}.npz")))
    return st.one_of(*choices)


def _read_medmnist(folder: Path) -> object:
    return load_set(next(folder.iterdir()).stem, folder)


# ---- pictures ------------------------------------------------------------------------------------------------


def picture_bytes(form: str, mode: str, size: tuple[int, int] = (9, 7), **options: Any) -> bytes:
    """A small picture."""
    image = Image.fromarray(_pixels(size[1], size[0], 3)).convert(mode)
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@functools.cache
def _samples() -> dict[str, list[bytes]]:
    more = [Image.fromarray(_pixels(7, 9, 3) + shift) for shift in (1, 2)]
    return {
        "png": [picture_bytes("PNG", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "I;16")],
        "jpg": [
            *(picture_bytes("JPEG", mode) for mode in ("L", "RGB", "CMYK")),
            picture_bytes("JPEG", "RGB", (20, 33), progressive=True, subsampling=2),
            picture_bytes("JPEG", "RGB", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0", icc_profile=b"x" * 200),
        ],
        "webp": [
            picture_bytes("WEBP", "RGB"),
            picture_bytes("WEBP", "RGBA", lossless=True),
            picture_bytes("WEBP", "RGB", save_all=True, append_images=more),
        ],
        "bmp": [picture_bytes("BMP", mode) for mode in ("1", "L", "P", "RGB")],
    }


def picture_files() -> SearchStrategy[tuple[str, bytes]]:
    """Pictures as people have them, with the endings of their names."""
    samples = _samples()
    choices = [
        st.sampled_from(contents).flatmap(damaged).map(partial(_ending, ending)) for ending, contents in samples.items()
    ]
    chunks = st.sampled_from(samples["png"]).flatmap(odd_png).map(lambda content: ("png", content))
    return st.one_of(chunks, *choices)


def _pictures() -> SearchStrategy[Files]:
    return st.tuples(st.sampled_from("13"), picture_files()).map(lambda made: {f"{made[0]}.{made[1][0]}": made[1][1]})


def _read_picture(folder: Path) -> object:
    path = next(folder.iterdir())
    pixels = read_picture(path, 8, int(path.stem))
    assert pixels.shape == (int(path.stem), 8, 8)
    assert pixels.dtype == np.uint8
    return pixels


NAMES = ("a", "b", "train", "val", "test", "images", "..a", "é", "a b", "x" * 100, "a\x1b[2Jb", "a\nb")
LISTED = (
    "p0.png",
    "p1.png",
    "x",
    "",
    "../a/0.png",
    "/etc/passwd",
    "\t",
    "a",
    "b",
    "\0",
    "\ud800".encode("utf-8", "replace").decode(),
)


@st.composite
def _folder(draw: DrawFn) -> Files:
    """Folders of classes with odd names; one picture is mutated; the list of Tiny-ImageNet's validation part too."""
    picture = picture_bytes("PNG", "L")
    part = draw(st.sampled_from(("", "train/")))
    first, second = draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMES))
    found = {f"{part}{name}/{number}.png": picture for name in (first, second, "a", "b") for number in range(5)}
    if part and draw(st.booleans()):
        lines = [f"p{number}.png\t{name}\t0\t0\t9\t7" for number, name in enumerate(("a", "b", "a"))]
        text = draw(odd_lines(lines, LISTED, "\t"))
        found |= {f"val/images/p{number}.png": picture for number in range(3)}
        found["val/val_annotations.txt"] = draw(damaged(text.encode("utf-8", "surrogatepass"), 1))
    ending, content = draw(picture_files())
    found[f"{part}a/0.{draw(st.sampled_from((ending, 'png')))}"] = content
    return found


def _read_folder(folder: Path) -> object:
    return load_set("image-folder", folder, path=str(folder), size=8, channels=3)


COLUMNS = ("Image Index", "Finding Labels", "Follow-up #", "Patient ID", "Patient Age")
CELLS = (
    *("", "x", "0.png", "9.png", "Mass", "Mass|Edema", "Mass|", "No Finding", "Hernia|x", '"', '"Mass', "'", ",", "\0"),
    *("é", "../0.png", "-1", "9" * 50, "x" * 140_000, '"a\nb"', "\x1b[2J", "a\rb", "Image Index", "\ufeff", "\u2028"),
)


@st.composite
def _nih(draw: DrawFn) -> Files:
    """The table with odd cells, the list of test images, and one picture that is mutated."""
    lines = [",".join(COLUMNS)]
    lines += [
        f"{number}.png,{finding},0,{number},50Y" for number, finding in enumerate(("Mass|Edema", "No Finding") * 4)
    ]
    table = draw(odd_lines(lines, CELLS, ",")).encode()
    found = {"Data_Entry_2017.csv": draw(damaged(table, 1))}
    found |= {f"images_001/{number}.png": picture_bytes("PNG", "L") for number in range(8)}
    if draw(st.booleans()):
        found["images_001/0.png"] = draw(picture_files())[1]
    if draw(st.booleans()):
        found["test_list.txt"] = draw(damaged(b"6.png\n7.png\n"))
    return found


def _read_nih(folder: Path) -> object:
    return load_set("nih-chestxray", folder, size=8)


# A blank picture of many pixels is legal and packs to almost nothing: pictures have room for four million.
PICTURES = 3 * 2**26

DATA_READERS = (
    Reader("idx", _idx, lambda folder: read_idx(folder / "images", (None, 5, 4)), 1500),
    Reader("mnist", _mnist, lambda folder: load_set("mnist", folder), 800),
    Reader("cifar10", _cifar10, lambda folder: load_set("cifar10", folder), 2500),
    Reader("cifar100", _cifar100, lambda folder: load_set("cifar100", folder), 1000),
    Reader("archive", _archive, lambda folder: unpack(folder / "set.tar.gz", folder), 2000),
    Reader("medmnist", _medmnist, _read_medmnist, 2500),
    Reader("picture", _pictures, _read_picture, 3000, memory=PICTURES, ratio=10**6),
    Reader("image-folder", _folder, _read_folder, 500, memory=PICTURES, ratio=10**6),
    Reader("nih-chestxray", _nih, _read_nih, 600, memory=PICTURES, ratio=10**6),
)
