from __future__ import annotations

import os
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.errors import FedveilError
from fedveil.registry import datasets
from fedveil.tasks.formats.npz import read_npz
from fedveil.tasks.sources import SOURCES
from fedveil.tasks.task import label_table, task

GRAY = ("chestmnist", "octmnist", "pneumoniamnist", "breastmnist", "tissuemnist")
GRAY = (*GRAY, "organamnist", "organcmnist", "organsmnist")
COLOR = ("pathmnist", "dermamnist", "retinamnist", "bloodmnist")


def arrays(name: str, seed: int = 0, **changed: Any) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    classes = len(datasets.load(name).class_names)  # type: ignore[attr-defined]
    made: dict[str, np.ndarray] = {}
    for part, count in (("train", 30), ("val", 6), ("test", 8)):
        shape = (count, 28, 28, 3) if name in COLOR else (count, 28, 28)
        made[f"{part}_images"] = random.integers(0, 256, shape, dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8)[:, None] % classes
        if name == "chestmnist":
            labels = random.integers(0, 2, (count, 14), dtype=np.uint8)
        made[f"{part}_labels"] = labels
    return {**made, **changed}


def save(folder: Path, name: str, held: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", **held)  # type: ignore[arg-type]
    return folder / f"{name}.npz"


def test_all_twelve_are_registered() -> None:
    assert set(GRAY + COLOR) <= datasets.entries().keys()
    assert len(GRAY + COLOR) == 12
    assert set(GRAY + COLOR) <= SOURCES.keys()


@pytest.mark.parametrize("name", GRAY + COLOR)
def test_every_set_reads_its_own_parts(tmp_path: Path, name: str) -> None:
    held = arrays(name)
    save(tmp_path / "medmnist", name, held)
    data = datasets.build(name).load(tmp_path)
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (30, 6, 8)
    assert data.shape == ((3, 28, 28) if name in COLOR else (1, 28, 28))
    first = held["test_images"][3]
    expected = first.transpose(2, 0, 1) if name in COLOR else first[None]
    assert np.array_equal(data.test.images[3], expected)  # type: ignore[index]
    assert data.train.multi_label == (name == "chestmnist")
    if name not in ("pneumoniamnist", "breastmnist"):
        pixels = np.asarray(data.train.images) / 255
        assert data.normalization.mean == pytest.approx(pixels.mean((0, 2, 3)), abs=6e-5)
        assert data.normalization.std == pytest.approx(pixels.std((0, 2, 3)), abs=6e-5)


def test_a_task_of_one_set(tmp_path: Path) -> None:
    save(tmp_path, "breastmnist", arrays("breastmnist"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch would complain of arrays that it must not write to
        made = task("breastmnist", model="mlp:hidden=[4]", data_root=tmp_path, clients=2)
    assert (made.classes, made.labels, len(made.train)) == (2, None, 30)
    assert label_table(made) == [torch.bincount(made.train.labels[c], minlength=2).tolist() for c in made.clients]


def test_several_labels_per_image(tmp_path: Path) -> None:
    held = arrays("chestmnist")
    save(tmp_path, "chestmnist", held)
    made = task("chestmnist", model="mlp:hidden=[4]", data_root=tmp_path, clients=3)
    assert (made.classes, made.labels) == (None, 14)
    assert made.loss is torch.nn.functional.binary_cross_entropy_with_logits
    inputs, targets = made.train.batch([4, 2])
    assert (targets.shape, targets.dtype) == ((2, 14), torch.float32)
    assert targets.numpy().tolist() == held["train_labels"][[4, 2]].tolist()
    assert made.model(inputs).shape == (2, 14)
    assert np.array_equal(np.sum(label_table(made), 0), held["train_labels"].sum(0))
    pooled = task("chestmnist", model="mlp:hidden=[4]", data_root=tmp_path, split="80/10/10")
    assert len(pooled.train) + len(pooled.test) + len(pooled.validation or ()) == 44
    with pytest.raises(FedveilError, match=r"dirichlet divides by class.*use iid"):
        task("chestmnist", model="mlp:hidden=[4]", data_root=tmp_path, partition="dirichlet")


@pytest.mark.parametrize(
    "name, counts, sums",
    [("pneumoniamnist", (4708, 524, 624), [1214, 3494]), ("breastmnist", (546, 78, 156), [147, 399])],
)
def test_the_real_sets(real_data: Path, name: str, counts: tuple[int, ...], sums: list[int]) -> None:
    data = datasets.build(name).load(real_data)
    assert tuple(len(part) for part in data.parts.values()) == counts
    assert np.bincount(data.train.labels).tolist() == sums
    pixels = np.asarray(data.train.images) / 255
    assert abs(pixels.mean() - data.normalization.mean[0]) < 2e-4
    assert abs(pixels.std() - data.normalization.std[0]) < 2e-4


def npy(header: str, content: bytes = b"") -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def described(shape: object, kind: str = "|u1") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n"


HUGE = 10**12


@pytest.mark.parametrize(
    "content, line",
    [
        (npy(described((HUGE, 28, 28))), "promises 784,000,000,000,000 bytes of data, more than"),
        (npy(described((10**6, 28, 28)), bytes(100)), "promises 784,000,000 bytes of data and does not hold them"),
        (npy(described((2, 28, 28)), bytes(2 * 784 - 1)), "does not hold them"),
        (npy(described((2, 28, 28)), bytes(2 * 784 + 1)), "does not hold them"),
        (npy(described((2, 28, 29)), bytes(2 * 812)), "holds 2 × 28 × 29, expected N × 28 × 28"),
        (npy(described((0, 28, 28))), "holds 0 × 28 × 28"),
        (npy(described((2, 28, 28), "<f4"), bytes(8 * 784)), "holds float32 values, expected whole numbers"),
        (npy(described((2, 28, 28), "|O"), bytes(99)), "Python objects, which are never read"),
        (npy(described("(-1, 28, 28)")), "header is damaged"),
        (npy(described("__import__('os')")), "header is damaged"),
        (npy("{" * 3000), "header is damaged"),
        (npy(" " * 5000), "header has 5,000 bytes"),
        (b"\x93NUMPX\x01\x00", "not an array: it starts with"),
        (b"", "not an array: it starts with nothing"),
        (b"\x93NUMPY\x01\x00", "cut short or damaged"),
    ],
    ids=range(15),
)
def test_hostile_arrays_get_one_line(tmp_path: Path, content: bytes, line: str) -> None:
    path = zipped(tmp_path / "a.npz", a=content)
    with pytest.raises(FedveilError, match=line) as caught:
        read_npz(path, {"a": (None, 28, 28)})
    assert "\n" not in str(caught.value)


class MakesFolder:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    np.savez(tmp_path / "a.npz", a=np.array([MakesFolder(mark)], dtype=object))
    with pytest.raises(FedveilError, match="Python objects, which are never read"):
        read_npz(tmp_path / "a.npz", {"a": (None,)})
    assert not mark.exists()


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_numpys_own_packing_is_read(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", compression=method) as archive:
        archive.writestr("a.npy", npy("{'descr': '|u1', 'fortran_order': False, 'shape': (3,)}") + bytes(3))
    with pytest.raises(FedveilError, match="packed in a way that numpy does not use"):
        read_npz(tmp_path / "a.npz", {"a": (None,)})


def test_a_name_that_is_no_text_gets_one_line(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.npz", ä=b"")  # its name is marked as UTF-8
    path.write_bytes(path.read_bytes().replace("ä".encode(), b"\xff\xff"))
    with pytest.raises(FedveilError, match="cut short or damaged"):
        read_npz(path, {"a": (None,)})


def test_files_cut_short_or_of_another_kind(tmp_path: Path) -> None:
    path = save(tmp_path, "breastmnist", arrays("breastmnist"))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 255
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"PK", b"<html>not found</html>", bytes(flipped)):
        path.write_bytes(content)
        with pytest.raises(FedveilError) as caught:
            datasets.build("breastmnist").load(tmp_path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "changed, line",
    [
        ({"train_labels": np.full((30, 1), 2, np.uint8)}, "label 2 is out of range: there are 2 classes"),
        ({"train_labels": np.zeros((29, 1), np.uint8)}, "30 images but 29 labels"),
        ({"test_labels": np.zeros(8, np.uint8)}, "holds 8, expected N × 1"),
        ({"val_images": np.zeros((6, 28, 28, 3), np.uint8)}, "expected N × 28 × 28"),
        ({"val_images": np.zeros((6, 28, 28), np.int32)}, "images are int32, expected uint8"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, np.ndarray], line: str) -> None:
    save(tmp_path, "breastmnist", arrays("breastmnist", **changed))
    with pytest.raises(FedveilError, match=line):
        datasets.build("breastmnist").load(tmp_path)


def test_an_array_that_is_not_there_is_named(tmp_path: Path) -> None:
    held = arrays("breastmnist")
    del held["val_labels"]
    save(tmp_path, "breastmnist", held)
    with pytest.raises(FedveilError, match="has no array val_labels; it holds 'train_images', 'train_labels'"):
        datasets.build("breastmnist").load(tmp_path)
    labels = np.full((30, 14), 2, np.uint8)
    save(tmp_path, "chestmnist", arrays("chestmnist", train_labels=labels))
    with pytest.raises(FedveilError, match="must be 0 or 1"):
        datasets.build("chestmnist").load(tmp_path)
