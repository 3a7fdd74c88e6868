from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import FedveilError
from fedveil.tasks.datasets.base import LoadedData, Part
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.splits import FractionSplit, OwnSplit, Parts, part_sizes, read_split, splits


def numbered(train: int, test: int, validation: int = 0) -> LoadedData:
    """A set in which every image is a different number, so that each can be found again."""
    numbers = iter(np.split(np.arange(train + test + validation), [train, train + test]))

    def part(values: np.ndarray) -> Part:
        return Part((values / 1000).astype(np.float64).reshape(-1, 1, 1, 1), values % 3)

    first, second, third = map(part, numbers)
    unit = Normalization((0.0,), (1.0,))
    return LoadedData("numbers", first, second, unit, ("a", "b", "c"), third if validation else None)


def members(parts: Parts) -> list[list[int]]:
    """The numbers in each part; their labels are checked on the way."""
    found = []
    for part in (parts.train, parts.validation, parts.test):
        if part is None:
            found.append([])
            continue
        inputs, targets = part.batch(range(len(part)))
        assert isinstance(inputs, torch.Tensor)
        numbers = (inputs.flatten() * 1000).round().to(torch.int64)
        assert targets.equal(numbers % 3)
        found.append(numbers.tolist())
    return found


@settings(deadline=None)  # others may share the machine
@given(train=st.integers(10, 80), test=st.integers(1, 30), seed=st.integers(0, 2**40))
def test_fractions_cover_everything_once(train: int, test: int, seed: int) -> None:
    found = members(FractionSplit().divide(numbered(train, test), seed))
    assert sorted(itertools.chain(*found)) == list(range(train + test))
    assert [len(part) for part in found] == part_sizes(train + test, (70, 15, 15))


@settings(deadline=None)  # others may share the machine
@given(size=st.integers(3, 10**5), shares=st.lists(st.floats(0.001, 100), min_size=1, max_size=3))
def test_sizes_sum_up_and_follow_the_shares(size: int, shares: list[float]) -> None:
    sizes = part_sizes(size, tuple(shares))
    assert sum(sizes) == size
    assert min(sizes) >= 1
    for count, share in zip(sizes, shares, strict=True):
        exact = share * size / sum(shares)
        assert count == 1 or abs(count - exact) < 1 + sum(s * size / sum(shares) < 1 for s in shares)


def test_fractions_shuffle_by_seed() -> None:
    data = numbered(60, 40)
    first, again, other = (members(FractionSplit().divide(data, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first[0] != sorted(first[0])


def test_own_keeps_the_test_part_and_holds_out_some_of_the_training_part() -> None:
    train, validation, test = members(OwnSplit(validation=0.2).divide(numbered(50, 10), seed=3))
    assert test == list(range(50, 60))
    assert len(validation) == 10
    assert train == sorted(set(range(50)) - set(validation))
    assert validation != list(range(40, 50))


def test_own_without_validation_and_with_the_sets_own() -> None:
    parts = OwnSplit(validation=0).divide(numbered(50, 10), seed=0)
    assert parts.validation is None
    assert len(parts.train) == 50
    assert members(OwnSplit().divide(numbered(50, 10, validation=5), seed=0)) == [
        list(range(50)),
        list(range(60, 65)),
        list(range(50, 60)),
    ]


@pytest.mark.parametrize(
    "given, expected",
    [
        ("own", OwnSplit()),
        ("own:validation=1/4", OwnSplit(validation=0.25)),
        ("70/15/15", FractionSplit(train=70, validation=15, test=15)),
        ("80/20", FractionSplit(train=80, validation=0, test=20)),
        ([0.8, 0.1, 0.1], FractionSplit(train=0.8, validation=0.1, test=0.1)),
        (OwnSplit(), OwnSplit()),
    ],
)
def test_splits_as_users_write_them(given: object, expected: object) -> None:
    assert read_split(given) == expected  # type: ignore[arg-type]
    assert read_split(splits.spell(expected)) == expected


@pytest.mark.parametrize("given", ["owm", "70", "70/10/10/10", "70/x/30", (1.0,), (0, 50, 50), (70, -1, 31), "own:v=1"])
def test_a_split_that_makes_no_sense_is_refused(given: object) -> None:
    with pytest.raises(FedveilError):
        read_split(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given, shown, total",
    [
        ("70/20", "70/20", "90"),
        ("50/50/50", "50/50/50", "150"),
        ((0.7, 0.2), "0.7/0.2", "0.9"),
        ((2, 1, 1), "2/1/1", "4"),
        ("fractions:train=0.5", "0.5/0.15/0.15", "0.8"),
    ],
)
def test_shares_must_add_up(given: object, shown: str, total: str) -> None:
    line = f"^the split {shown} adds up to {total}, not to 100 or 1: write 70/15/15 .* or 80/20 .train/test.$"
    with pytest.raises(FedveilError, match=line):
        read_split(given)  # type: ignore[arg-type]
    for right in ("33.3/33.3/33.4", (1 / 3, 1 / 3, 1 / 3), "90/10"):
        read_split(right)


def test_too_few_examples_are_said() -> None:
    with pytest.raises(FedveilError, match="2 examples cannot be divided into 3 parts"):
        part_sizes(2, (70, 15, 15))
