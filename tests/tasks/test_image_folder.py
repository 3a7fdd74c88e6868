from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedveil.errors import FedveilError
from fedveil.registry import datasets
from fedveil.tasks import examples
from fedveil.tasks.formats.pictures import read_picture
from fedveil.tasks.task import label_table, task

from .conftest import png_bytes


def fill(folder: Path, count: int, shade: int, size: tuple[int, int] = (12, 10), suffix: str = "png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.full((*size, 3), shade + number, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.{suffix}")


def load(path: Path, **fields: object) -> object:
    return datasets.build("image-folder", path=str(path), size=8, **fields).load(None)


def test_classes_alone_hold_out_every_fifth(tmp_path: Path) -> None:
    fill(tmp_path / "cat", 10, 50)
    fill(tmp_path / "dog", 5, 150)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("not a picture")
    data = load(tmp_path)
    assert data.class_names == ("cat", "dog")
    assert (np.bincount(data.train.labels).tolist(), np.bincount(data.test.labels).tolist()) == ([8, 4], [2, 1])
    assert data.shape == (3, 8, 8)
    assert data.validation is None


def test_parts_of_its_own(tmp_path: Path) -> None:
    for part, count in (("train", 6), ("val", 2), ("test", 3)):
        fill(tmp_path / part / "a", count, 10)
        fill(tmp_path / part / "b", count, 100)
    data = load(tmp_path)
    assert [len(part) for part in data.parts.values()] == [12, 4, 6]


def test_imagenets_layout_has_its_test_part_in_val(tmp_path: Path) -> None:
    for wnid in ("n01440764", "n01443537"):
        fill(tmp_path / "train" / wnid, 3, 20, suffix="JPEG")
        fill(tmp_path / "val" / wnid, 2, 40, suffix="JPEG")
    data = load(tmp_path)
    assert (len(data.train), data.validation, len(data.test)) == (6, None, 4)
    assert data.class_names == ("n01440764", "n01443537")


def tiny(folder: Path) -> Path:
    for wnid in ("n01", "n02"):
        fill(folder / "train" / wnid / "images", 3, 20, suffix="JPEG")
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("000.JPEG\t0\t0\t1\t1\n")
    fill(folder / "val" / "images", 4, 60, suffix="JPEG")
    fill(folder / "test" / "images", 2, 60, suffix="JPEG")
    lines = [f"{n:03d}.JPEG\tn0{2 - n % 2}\t0\t0\t62\t62\n" for n in range(4)]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


def test_tiny_imagenets_layout(tmp_path: Path) -> None:
    data = load(tiny(tmp_path))
    assert (len(data.train), data.validation, len(data.test)) == (6, None, 4)
    assert data.test.labels.tolist() == [1, 0, 1, 0]


def test_tiny_imagenets_validation_part_alone(tmp_path: Path) -> None:
    val = tiny(tmp_path) / "val"
    fill(val / "images", 12, 60, suffix="JPEG")
    lines = [f"{n:03d}.JPEG\tn0{2 - n % 2}\t0\t0\t62\t62\n" for n in range(12)]
    (val / "val_annotations.txt").write_text("".join(lines))
    data = load(val)
    assert data.class_names == ("n01", "n02")
    assert data.train.labels.tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert data.test.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    "line", ["gone.JPEG\tn01", "000.JPEG", "../../train/n01/images/000.JPEG\tn01", "000.JPEG\tn09"]
)
def test_wrong_annotations_are_refused(tmp_path: Path, line: str) -> None:
    (tiny(tmp_path) / "val" / "val_annotations.txt").write_text(line + "\n")
    with pytest.raises(FedveilError, match=r"val_annotations.txt, line 1|class n09 has no pictures"):
        load(tmp_path)


def test_the_short_side_is_resized_and_the_middle_kept(tmp_path: Path) -> None:
    pixels = np.zeros((20, 60), np.uint8)
    pixels[:, 20:40] = 200
    (tmp_path / "wide.png").write_bytes(png_bytes(pixels))
    (tmp_path / "tall.png").write_bytes(png_bytes(pixels.T))
    for name in ("wide.png", "tall.png"):
        gray = read_picture(tmp_path / name, 10, 1)
        assert gray.shape == (1, 10, 10)
        assert (gray[0, 1:-1, 1:-1] == 200).all()
        assert gray.min() > 150  # at its edge a little of what lies beside is mixed in
        assert read_picture(tmp_path / name, 10, 3).shape == (3, 10, 10)
    exact = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    (tmp_path / "same.png").write_bytes(png_bytes(exact))
    assert np.array_equal(read_picture(tmp_path / "same.png", 8, 1)[0], exact)


def test_pictures_of_different_sizes_make_one_batch(tmp_path: Path) -> None:
    top = tmp_path / "all"
    for part in ("train", "test"):
        for label in "ab":
            (top / part / label).mkdir(parents=True)
            for number in range(3):
                shape = (4 + 9 * number, 30 - 7 * number)
                (top / part / label / f"{number}.png").write_bytes(png_bytes(np.full(shape, 40 * number)))
    made = task(
        f"image-folder:path={top},size=8,channels=1", model="mlp:hidden=[4]", clients=2, split="own:validation=0"
    )
    inputs, targets = made.train.batch(range(6))
    assert inputs.shape == (6, 1, 8, 8)
    assert made.normalization is not None
    assert torch.allclose(255 * made.normalization.pixels(inputs)[:3, 0, 0, 0], torch.tensor([0.0, 40, 80]), atol=1e-3)
    assert targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.sum(label_table(made), 0).tolist() == [3, 3]
    again = task(**made.description)
    assert again.data_hash == made.data_hash
    (top / "train" / "a" / "0.png").write_bytes(png_bytes(np.full((50, 50), 1)))
    assert task(**made.description).data_hash != made.data_hash


def test_pictures_are_read_when_needed_and_the_first_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for label in "ab":
        fill(tmp_path / "train" / label, 4, 10)
        fill(tmp_path / "test" / label, 2, 10)
    monkeypatch.setattr(examples, "KEPT", 3 * 3 * 8 * 8)
    made = task(f"image-folder:path={tmp_path},size=8", model="mlp:hidden=[4]", clients=2, split="own:validation=0")
    reads = []
    images = made.train._images  # type: ignore[attr-defined]
    read = type(images).read
    monkeypatch.setattr(type(images), "read", lambda self, place: reads.append(place) or read(self, place))
    made.train.subset([2, 3, 4, 5, 6]).batch(range(5))
    made.train.batch([2, 3, 4, 5, 6])
    kept = {place for place in range(2, 7) if reads.count(place) < 2}
    assert 1 <= len(kept) <= 3
    assert made.train.batch([])[0].shape == (0, 3, 8, 8)


def test_pooled_shares(tmp_path: Path) -> None:
    for label in "ab":
        fill(tmp_path / "train" / label, 6, 10)
        fill(tmp_path / "test" / label, 4, 10)
    made = task(f"image-folder:path={tmp_path},size=8", model="mlp:hidden=[4]", clients=2, split="70/15/15")
    assert (len(made.train), len(made.validation or ()), len(made.test)) == (14, 3, 3)


def png_bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(10))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "content, line",
    [
        (png_bomb(10_000, 10_000), "10000 × 10000 pixels, more than the 67,108,864 allowed"),
        (png_bomb(100_000, 100_000), "pixels, more than the 67,108,864 allowed"),
        (png_bomb(8000, 8000), "promises 8000 × 8000 pixels, more than the file can hold"),
        (png_bomb(2000, 2000), "cannot read this picture"),
        (png_bytes(np.random.default_rng(0).integers(0, 256, (90, 90)))[:4000], "cannot read this picture"),
        (b"", "not a picture in one of the formats JPEG, PNG, WEBP, BMP"),
        (b"GIF89a" + bytes(50), "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not a picture"),
    ],
    ids=["large", "huge", "lying", "no content", "cut short", "empty", "GIF", "PostScript"],
)
def test_hostile_pictures_get_one_line(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(FedveilError, match=line) as caught:
        read_picture(path, 8, 1)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_chunk_that_says_it_is_long_takes_no_memory(tmp_path: Path) -> None:
    content = png_bytes(np.zeros((9, 9), np.uint8))
    start = content.index(b"IDAT") - 4
    (tmp_path / "a.png").write_bytes(content[:start] + b"\xff\xff\0\0" + content[start + 4 :])
    tracemalloc.start()
    try:
        with contextlib.suppress(FedveilError):
            read_picture(tmp_path / "a.png", 8, 1)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_folders_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match=r"there is no folder .*gone"):
        load(Path("gone"))
    (tmp_path / "one").mkdir()
    fill(tmp_path / "one" / "a", 5, 1)
    with pytest.raises(FedveilError, match="1 class folder with pictures, need two"):
        load(tmp_path / "one")
    fill(tmp_path / "few" / "a", 2, 1)
    fill(tmp_path / "few" / "b", 2, 1)
    with pytest.raises(FedveilError, match="no class has 5 pictures"):
        load(tmp_path / "few")
    fill(tmp_path / "parts" / "train" / "a", 2, 1)
    fill(tmp_path / "parts" / "train" / "b", 2, 1)
    (tmp_path / "parts" / "test").mkdir()
    with pytest.raises(FedveilError, match="test: no pictures in class folders"):
        load(tmp_path / "parts")
    fill(tmp_path / "parts" / "test" / "c", 2, 1)
    with pytest.raises(FedveilError, match="class c has no pictures in the training part"):
        load(tmp_path / "parts")


def test_a_path_is_looked_for_in_the_data_root(tmp_path: Path) -> None:
    fill(tmp_path / "mine" / "a", 5, 1)
    fill(tmp_path / "mine" / "b", 5, 1)
    assert len(datasets.parse("image-folder:path=mine,size=4").load(tmp_path).train) == 8
