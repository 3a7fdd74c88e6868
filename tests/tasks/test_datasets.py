from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedveil.errors import FedveilError
from fedveil.registry import datasets
from fedveil.tasks.datasets.base import LoadedData, Part
from fedveil.tasks.datasets.digits import Digits
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.sources import data_root

FILES = "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz"


def test_digits_need_no_files() -> None:
    data = datasets.build("digits").load(None)
    assert data.shape == (1, 8, 8)
    assert (len(data.train), len(data.test), data.classes) == (1437, 360, 10)
    assert data.train.images.min() == 0
    assert data.train.images.max() == 1
    assert set(data.test.labels) == set(range(10))


def test_digits_statistics_are_those_of_its_training_part() -> None:
    images = Digits().load().train.images.astype(np.float64)
    assert round(images.mean(), 4) == Digits.mean
    assert round(images.std(), 4) == Digits.std


@pytest.mark.parametrize(
    "name, sums, mean",
    [
        ("mnist", [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], 0.1307),
        ("fashion-mnist", [6000] * 10, 0.2860),
    ],
)
def test_the_real_sets(real_data: Path, name: str, sums: list[int], mean: float) -> None:
    data = datasets.build(name).load(real_data)
    assert data.train.images.shape == (60000, 1, 28, 28)
    assert data.test.images.shape == (10000, 1, 28, 28)
    assert np.bincount(data.train.labels).tolist() == sums
    assert data.normalization.mean == (mean,)
    assert abs(data.train.images.mean() / 255 - data.normalization.mean[0]) < 5e-5
    assert abs(data.train.images.std() / 255 - data.normalization.std[0]) < 5e-5


@pytest.mark.parametrize("place", ["mnist", "."])
def test_files_are_found_in_the_sets_folder_and_in_the_root(
    tmp_path: Path, write_mnist: Callable[..., Path], place: str
) -> None:
    write_mnist(tmp_path / place)
    data = datasets.build("mnist").load(tmp_path)
    assert data.train.images.shape == (40, 1, 28, 28)
    assert data.train.images.dtype == np.uint8
    assert data.train.labels.dtype == np.int64


def test_the_sets_own_folder_goes_before_the_root(tmp_path: Path, write_mnist: Callable[..., Path]) -> None:
    write_mnist(tmp_path, train=20)
    write_mnist(tmp_path / "fashion-mnist", train=30)
    assert len(datasets.build("fashion-mnist").load(tmp_path).train) == 30
    assert len(datasets.build("mnist").load(tmp_path).train) == 20


def test_the_environment_names_the_root(
    tmp_path: Path, write_mnist: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "mnist")
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    assert len(datasets.build("mnist").load(None).train) == 40
    assert data_root(tmp_path / "other") == tmp_path / "other"
    monkeypatch.delenv("FEDVEIL_DATA")
    assert data_root() == Path.home() / ".cache" / "fedveil"


def test_missing_files_are_named_with_their_folder_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(FedveilError) as caught:
        datasets.build("mnist").load(tmp_path)
    line = str(caught.value)
    assert f"no {FILES} (or without .gz) in {tmp_path / 'mnist'}" in line
    assert "FEDVEIL_DATA" in line
    assert "--data-root" in line
    assert "\n" not in line


def test_one_missing_file_is_the_one_named(tmp_path: Path, write_mnist: Callable[..., Path]) -> None:
    (write_mnist(tmp_path) / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FedveilError) as caught:
        datasets.build("mnist").load(tmp_path)
    assert f"no t10k-labels-idx1-ubyte.gz (or without .gz) in {tmp_path}:" in str(caught.value)


@pytest.mark.parametrize(
    "changed, line",
    [
        ({"train_labels": np.arange(39, dtype=np.uint8) % 10}, r"mnist \(train\): 40 images but 39 labels"),
        ({"t10k_labels": np.full(10, 10, dtype=np.uint8)}, r"mnist \(test\): label 10 is out of range.* 0 to 9"),
        ({"train_images": np.zeros((40, 32, 32), dtype=np.uint8)}, "expected N × 28 × 28"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, write_mnist: Callable[..., Path], changed: dict[str, np.ndarray], line: str
) -> None:
    write_mnist(tmp_path / "mnist", **changed)
    with pytest.raises(FedveilError, match=line):
        datasets.build("mnist").load(tmp_path)


def loaded(images: np.ndarray, labels: np.ndarray) -> LoadedData:
    part = Part(images, labels)
    return LoadedData("toy", part, part, Normalization((0.5,), (0.5,)), ("a", "b"))


LABELS = np.array([0, 1, 1])
PIXELS = np.random.default_rng(0).random((3, 1, 4, 4), dtype=np.float32)


@pytest.mark.parametrize(
    "images, labels, line",
    [
        (np.where(PIXELS > 0.9, np.float32("nan"), PIXELS), LABELS, "NaN"),
        (255 * PIXELS, LABELS, r"pixels must be in \[0, 1\]"),
        (PIXELS.astype(np.int32), LABELS, "int32, expected uint8"),
        (PIXELS[:, 0], LABELS, "expected .N, 1, height, width"),
        (np.repeat(PIXELS, 3, axis=1), LABELS, "expected .N, 1, height, width"),
        (PIXELS, np.array([0, -1, 1]), "label -1 is out of range"),
        (PIXELS, LABELS.astype(np.uint8), "expected int64"),
        (PIXELS[:0], LABELS[:0], "no examples"),
    ],
)
def test_arrays_are_checked(images: np.ndarray, labels: np.ndarray, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        loaded(images, labels)


def test_the_hash_is_of_the_contents() -> None:
    data = loaded(PIXELS, LABELS)
    assert data.sha256 == loaded(PIXELS.copy(), LABELS.copy()).sha256
    assert len(data.sha256) == 64
    brighter = PIXELS.copy()
    brighter[0, 0, 0, 0] = 1
    assert data.sha256 != loaded(brighter, LABELS).sha256
    assert data.sha256 != loaded(PIXELS, 1 - LABELS).sha256
    assert data.sha256 != replace(data, validation=data.test).sha256
