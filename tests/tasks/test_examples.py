from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from fedveil.errors import FedveilError
from fedveil.tasks.examples import ArrayExamples, DatasetExamples, Examples
from fedveil.tasks.normalization import Normalization

IMAGES = torch.randint(0, 256, (12, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3
GRAY = Normalization((0.25,), (0.5,))


class Items(Dataset[Any]):
    """A map-style data set of the items given, which counts how often it is read."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.items[index]


def both() -> list[Examples]:
    images = GRAY.normalize(IMAGES.float() / 255)
    return [ArrayExamples(IMAGES, LABELS, GRAY), DatasetExamples(TensorDataset(images, LABELS))]


@pytest.mark.parametrize("examples", both(), ids=["arrays", "dataset"])
def test_batches_are_normalized_floats_and_int64_targets(examples: Examples) -> None:
    assert len(examples) == 12
    assert examples.labels.equal(LABELS)
    inputs, targets = examples.batch([5, 0, 5])
    assert isinstance(inputs, Tensor)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert torch.allclose(inputs, (IMAGES[[5, 0, 5]] / 255 - 0.25) / 0.5)
    assert targets.tolist() == [2, 0, 2]


@pytest.mark.parametrize("examples", both(), ids=["arrays", "dataset"])
def test_a_subset_of_a_subset_reads_the_same_examples(examples: Examples) -> None:
    inner = examples.subset([9, 3, 7, 1]).subset(torch.tensor([2, 0]))
    assert inner.labels.equal(LABELS[[7, 9]])
    direct, inside = examples.batch([7, 9]), inner.batch(torch.tensor([0, 1]))
    assert direct[0].equal(inside[0])  # type: ignore[union-attr, arg-type]
    assert direct[1].equal(inside[1])
    assert len(examples) == 12
    assert inner.source_sha256 == examples.source_sha256


@pytest.mark.parametrize("examples", both(), ids=["arrays", "dataset"])
def test_batches_cover_all_in_order(examples: Examples) -> None:
    sizes, targets = zip(*[(len(inputs), targets) for inputs, targets in examples.batches(5)], strict=True)
    assert sizes == (5, 5, 2)
    assert torch.cat(targets).equal(LABELS)


@pytest.mark.parametrize("examples", both(), ids=["arrays", "dataset"])
def test_an_index_that_is_not_there_is_an_error(examples: Examples) -> None:
    with pytest.raises(IndexError):
        examples.batch([12])


def test_images_stay_uint8_and_shared_in_memory() -> None:
    images = IMAGES.clone()
    examples = ArrayExamples(images, LABELS, GRAY)
    images[0] = 255
    inputs, _ = examples.batch([0])
    assert torch.allclose(GRAY.pixels(inputs), torch.ones(1, 1, 4, 4))  # type: ignore[arg-type]


def test_floats_are_pixels_and_whole_numbers_are_tokens() -> None:
    floats, _ = ArrayExamples(IMAGES.double() / 255, LABELS, GRAY).batch([1])
    bytes_, _ = ArrayExamples(IMAGES, LABELS, GRAY).batch([1])
    assert torch.allclose(floats, bytes_)  # type: ignore[arg-type]
    tokens, _ = ArrayExamples({"ids": torch.arange(24).reshape(12, 2), "x": torch.ones(12, 2)}, LABELS).batch([1])
    assert isinstance(tokens, dict)
    assert tokens["ids"].tolist() == [[2, 3]]
    assert tokens["x"].dtype == torch.float32


@pytest.mark.parametrize(
    "inputs, normalization, line",
    [
        (torch.full((12, 2), float("nan")), None, "NaN or infinity"),
        ({"x": torch.full((12, 2), float("inf"))}, None, "'x' contain NaN or infinity"),
        (IMAGES[:11], GRAY, "11 inputs but 12 labels"),
        (IMAGES.float(), GRAY, r"pixels in \[0, 1\]"),
        (IMAGES.int(), GRAY, "uint8, or floating"),
        ({"x": IMAGES}, GRAY, "one tensor of images"),
    ],
)
def test_arrays_are_checked(inputs: Any, normalization: Normalization | None, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        ArrayExamples(inputs, LABELS, normalization)


def test_labels_of_a_dataset_are_read_once() -> None:
    items = Items([(torch.ones(2), np.int64(index % 2)) for index in range(6)])
    examples = DatasetExamples(items)
    assert items.reads == 6 + 2  # the first twice more, to see whether it stays the same
    assert examples.labels.tolist() == examples.subset(range(6)).labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert items.reads == 6 + 2


def test_random_transforms_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Shifting(Items):
        def __getitem__(self, index: int) -> Any:
            inputs, label = super().__getitem__(index)
            return inputs + self.reads, label

    DatasetExamples(Items([FINE]))
    assert not caplog.records
    DatasetExamples(Shifting([FINE]))
    assert "another input each time" in caplog.text


def test_a_dataset_may_give_numpy_named_parts_and_tensor_labels() -> None:
    items = Items([({"x": np.full(2, index, np.float32)}, torch.tensor([index])) for index in range(3)])
    inputs, targets = DatasetExamples(items).batch([2, 1])
    assert inputs["x"].tolist() == [[2.0, 2.0], [1.0, 1.0]]  # type: ignore[index]
    assert targets.tolist() == [2, 1]


def test_torch_subsets_work() -> None:
    source = TensorDataset(IMAGES, LABELS)
    assert DatasetExamples(Subset(source, [4, 5])).labels.tolist() == [1, 2]


FINE = (torch.ones(2), 0)


@pytest.mark.parametrize(
    "item, line",
    [
        ((torch.tensor([1.0, float("nan")]), 0), "NaN or infinity at example 1"),
        ((torch.ones(3), 0), r"example 1 of the data has shape \(3,\) torch.float32, the first has shape \(2,\)"),
        ((torch.ones(2), float("nan")), "label of example 1 must be one whole class number, not float"),
        ((torch.ones(2), torch.ones(2) / 0), "label of example 1 .*shape .2,. torch.float32"),
        ((torch.ones(2), 0.5), "all class numbers, or all rows of equally many numbers"),
        ((torch.ones(2), torch.ones(2)), "all class numbers, or all rows of equally many numbers"),
        ((torch.ones(2).byte(), 0), "example 1 of the data has shape .2,. torch.uint8, the first has .*float32"),
        (((torch.ones(2), torch.ones(2)), 0), "input of example 1 has 2 parts without names: write {'image': a"),
        ((torch.ones(2), {"a": 1}), "label of example 1 must be one whole class number, not dict"),
        ((torch.ones(2), 0, 1), "example 1 of the data is 3 things, expected a pair"),
        ((object(), 0), "input of example 1 must be a tensor or a numpy array, not object"),
        (torch.ones(2), "expected a pair"),
    ],
)
def test_items_are_checked(item: Any, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        DatasetExamples(Items([FINE, item]))


def test_a_dataset_that_fails_is_named_in_one_line() -> None:
    class Broken(Items):
        def __getitem__(self, index: int) -> Any:
            raise OSError("file gone\nwith details")

    with pytest.raises(FedveilError, match=r"^reading example 0 of the data failed: OSError: file gone$"):
        DatasetExamples(Broken([FINE]))


def test_a_dataset_without_length_is_refused() -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return FINE

    with pytest.raises(FedveilError, match="Endless has no length: give a map-style data set"):
        DatasetExamples(Endless())


def test_the_hash_depends_on_inputs_and_labels() -> None:
    hashes = {
        ArrayExamples(IMAGES, LABELS).source_sha256,
        ArrayExamples(255 - IMAGES, LABELS).source_sha256,
        ArrayExamples(IMAGES, LABELS.flip(0)).source_sha256,
    }
    assert len(hashes) == 3
    assert ArrayExamples(IMAGES.clone(), LABELS.clone()).source_sha256 in hashes
