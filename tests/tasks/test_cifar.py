from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.errors import FedveilError
from fedveil.registry import datasets
from fedveil.tasks.formats.cifar_pickle import read_cifar_pickle
from fedveil.tasks.task import task


def batch(count: int = 10, seed: int = 0, classes: int = 10, key: bytes = b"labels") -> dict[bytes, Any]:
    random = np.random.default_rng(seed)
    return {
        b"batch_label": b"a batch",
        key: [int(n) % classes for n in range(count)],
        b"data": random.integers(0, 256, (count, 3072), dtype=np.uint8),
        b"filenames": [b"%d.png" % n for n in range(count)],
    }


def as_python2(count: int = 3) -> bytes:
    """A batch byte by byte as Python 2 wrote the original files: byte strings, `numpy.core`, numbers for flags."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    raw = bytes(n % 251 for n in range(count * 3072))
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02(cnumpy\nndarray\nq\x03(K\x00tq\x04U\x01btq\x05Rq\x06("
        + b"K\x01("
        + b"K"
        + bytes([count])
        + b"M\x00\x0ctq\x07cnumpy\ndtype\nq\x08(U\x02u1K\x00K\x01tq\x09Rq\x0a"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    labels = b"]q\x0b(" + b"".join(b"K" + bytes([n]) for n in range(count)) + b"e"
    return b"\x80\x02}q\x01(" + short(b"data") + array + short(b"labels") + labels + b"u."


def write(folder: Path, *numbers: int, test: bool = True, **changed: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        held = {**batch(seed=number), **{key.encode(): value for key, value in changed.items()}}
        (folder / f"data_batch_{number}").write_bytes(pickle.dumps(held, protocol=2))
    if test:
        (folder / "test_batch").write_bytes(pickle.dumps(batch(4, seed=9), protocol=2))
    return folder


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_batch_reads_as_pickle_would(tmp_path: Path, protocol: int) -> None:
    held = batch()
    if protocol == 5:  # numpy then saves arrays in another way, which the published files do not use
        held[b"data"] = b""
    (tmp_path / "a").write_bytes(pickle.dumps(held, protocol=protocol))
    found = read_cifar_pickle(tmp_path / "a")
    assert found["labels"] == held[b"labels"]
    assert found["filenames"] == held[b"filenames"]
    assert np.array_equal(found["data"], held[b"data"]) or protocol == 5


def test_the_original_form_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(as_python2())
    found = read_cifar_pickle(tmp_path / "a")
    with_pickle = pickle.loads(as_python2(), encoding="bytes")
    assert found["labels"] == with_pickle[b"labels"] == [0, 1, 2]
    assert np.array_equal(found["data"], with_pickle[b"data"])
    assert found["data"].shape == (3, 3072)


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.how = (function, arguments)

    def __reduce__(self) -> Any:
        return self.how


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("inside", [True, False])
def test_a_pickle_that_runs_code_does_not(tmp_path: Path, protocol: int, inside: bool) -> None:
    mark = tmp_path / "ran"
    evil: Any = Runs(os.mkdir, str(mark))
    content = pickle.dumps({**batch(), b"labels": evil} if inside else evil, protocol=protocol)
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(FedveilError, match="not a file of CIFAR") as caught:
        read_cifar_pickle(tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    pickle.loads(content)  # the same bytes do run where nothing holds them
    assert mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Runs(eval, "1"), protocol=2),
        pickle.dumps(np.random.default_rng, protocol=2),
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85U\x01btR.",  # huge
        b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.",  # of objects
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # makes an instance in another way
        b"\x80\x02cnumpy\nndarray\n)R.",
        b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.",  # changes a class
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
        b"\x80\x02\x8a\xffabc.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # bytearray of a terabyte
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",  # bytes of a terabyte
        b"\x80\x02Kar\xff\xff\xff\xff.",  # remembered as number four billion
        b"\x80\x02U\x01aQ.",  # persistent id
        b"\x80\x02\x82\x01.",  # extension code
        b"\x80\x02]a.",
        b"",
        b"\x1f\x8b",
        pickle.dumps([1], protocol=2),
    ],
    ids=range(18),
)
def test_everything_else_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(FedveilError, match="CIFAR") as caught:
        read_cifar_pickle(tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_no_more_memory_is_taken_than_the_file_has(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pickle.dumps(batch(), protocol=2))
    tracemalloc.start()
    try:
        read_cifar_pickle(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_a_batch_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = as_python2()
    for length in [*range(0, 400, 7), *range(400, len(content), 997), len(content) - 1]:
        (tmp_path / "a").write_bytes(content[:length])
        with pytest.raises(FedveilError):
            read_cifar_pickle(tmp_path / "a")


def test_shape_and_content_must_agree(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(as_python2().replace(b"K\x03M\x00\x0c", b"K\x04M\x00\x0c"))
    with pytest.raises(FedveilError, match=r"says it is \(4, 3072\) and has 9,216 bytes"):
        read_cifar_pickle(tmp_path / "a")


@pytest.mark.parametrize("place", ["cifar-10-batches-py", "cifar10/cifar-10-batches-py", "cifar10"])
def test_cifar10_in_full(tmp_path: Path, place: str) -> None:
    write(tmp_path / place, 1, 2, 3, 4, 5)
    data = datasets.build("cifar10").load(tmp_path)
    assert (len(data.train), len(data.test), data.shape, data.classes, data.note) == (50, 4, (3, 32, 32), 10, "")
    first = batch(seed=1)[b"data"][0].reshape(3, 32, 32)
    assert np.array_equal(data.train.images[0], first)  # type: ignore[index]
    assert data.normalization.mean == (0.4915, 0.4823, 0.4468)


def test_some_training_batches_are_enough_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "cifar10", 1, 3)
    with caplog.at_level("WARNING", logger="fedveil"):
        made = task("cifar10", model="mlp:hidden=[4]", data_root=tmp_path, clients=2)
    assert made.note == "training batches 1, 3 of 5"
    assert len(made.train) == 18
    assert task(**made.description, data_root=tmp_path).data_hash == made.data_hash


def test_no_training_batch_or_no_test_batch_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a" / "cifar10")
    with pytest.raises(FedveilError, match=r"none of data_batch_1 to data_batch_5.*fedveil data fetch cifar10"):
        datasets.build("cifar10").load(tmp_path / "a")
    write(tmp_path / "b" / "cifar10", 1, test=False)
    with pytest.raises(FedveilError, match=r"no test_batch in .*cifar10"):
        datasets.build("cifar10").load(tmp_path / "b")


@pytest.mark.parametrize(
    "changed, line",
    [
        ({"labels": [0] * 9}, "10 images but 9 labels"),
        ({"labels": [10] * 10}, "label 10 is out of range"),
        ({"labels": [-1] * 10}, "no list of class numbers"),
        ({"labels": ["a"] * 10}, "no list of class numbers"),
        ({"labels": None}, "no list of class numbers"),
        ({"data": np.zeros((10, 784), np.uint8)}, r"images are \(10, 784\), expected N × 3072"),
        ({"data": np.zeros((10, 3072), np.float32)}, "expected bytes"),
        ({"data": b"none"}, "images are bytes"),
    ],
)
def test_batches_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any], line: str) -> None:
    write(tmp_path / "cifar10", 1, **changed)
    with pytest.raises(FedveilError, match=line):
        datasets.build("cifar10").load(tmp_path)


def test_cifar100(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, count in (("train", 200), ("test", 100)):
        held = {**batch(count, classes=100, key=b"fine_labels"), b"coarse_labels": [0] * count}
        (folder / name).write_bytes(pickle.dumps(held, protocol=2))
    names = [b"class %d" % n for n in range(100)]
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}, protocol=2))
    data = datasets.build("cifar100").load(tmp_path)
    assert (data.classes, data.class_names[7], len(data.train)) == (100, "class 7", 200)
    pixels = np.asarray(data.train.images) / 255
    assert data.normalization.mean == pytest.approx(pixels.mean((0, 2, 3)), abs=6e-5)
    assert data.normalization.std == pytest.approx(pixels.std((0, 2, 3)), abs=6e-5)
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": names[:9]}, protocol=2))
    with pytest.raises(FedveilError, match="names of 100 classes"):
        datasets.build("cifar100").load(tmp_path)


def test_the_real_cifar10(real_cifar10: Path) -> None:
    data = datasets.build("cifar10").load(real_cifar10)
    assert (len(data.train), len(data.test)) == (30000, 10000)
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    assert data.note == "training batches 1, 2, 3 of 5"
    pixels = np.asarray(data.train.images)[::10] / 255  # some pictures of some batches: near the figures of all
    assert pixels.mean((0, 2, 3)) == pytest.approx(data.normalization.mean, abs=0.01)
    assert pixels.std((0, 2, 3)) == pytest.approx(data.normalization.std, abs=0.01)
