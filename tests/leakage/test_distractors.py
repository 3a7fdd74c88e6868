"""Who the distractors are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.leakage.distractors import choose


def pool_of(classes: int, each: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    images = torch.rand(classes * each, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return images, torch.arange(classes).repeat(each)


@settings(max_examples=40, deadline=None)
@given(
    classes=st.integers(1, 4),
    each=st.integers(1, 12),
    count=st.integers(2, 30),
    seed=st.integers(0, 99),
    copy=st.booleans(),
)
def test_distractors_are_distinct_and_of_the_same_class_where_there_are_enough(
    classes: int, each: int, count: int, seed: int, copy: bool
) -> None:
    pool, pool_labels = pool_of(classes, each)
    originals, labels = torch.rand(5, 1, 4, 4), torch.arange(5) % classes
    if copy:
        originals[0] = pool[pool_labels == 0][0]
        if len(pool) == 1:
            return
    chosen = choose(originals, labels, pool, pool_labels, count=count, seed=seed)
    assert chosen.shape == (5, min(count - 1, len(pool) - copy))
    for row in range(5):
        assert len(set(chosen[row].tolist())) == chosen.shape[1]
        assert not any(torch.equal(pool[index], originals[row]) for index in chosen[row])
        available = each - (copy and row == 0)
        same = (pool_labels[chosen[row]] == labels[row]).sum().item()
        assert same == min(available, chosen.shape[1])


def test_distractors_are_reproducible_and_independent_of_the_other_images() -> None:
    pool, pool_labels = pool_of(2, 50)
    originals, labels = torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 0, 0])
    one = choose(originals, labels, pool, pool_labels, count=10, seed=3)
    assert torch.equal(one, choose(originals, labels, pool, pool_labels, count=10, seed=3))
    assert torch.equal(one[:2], choose(originals[:2], labels[:2], pool, pool_labels, count=10, seed=3))
    assert not torch.equal(one, choose(originals, labels, pool, pool_labels, count=10, seed=4))
    assert not torch.equal(one[2], one[3])


def test_only_exact_copies_are_left_out() -> None:
    original = torch.rand(1, 3, 20, 20)
    pool = original.repeat(1201, 1, 1, 1)
    pool.flatten(1)[torch.arange(1200), torch.arange(1200)] += 0.5  # each differs in one value; the last is a copy
    chosen = choose(original, torch.zeros(1), pool, torch.zeros(1201), count=5000)
    assert sorted(chosen[0].tolist()) == list(range(1200))


def test_distractors_with_several_labels_per_image() -> None:
    pool = torch.rand(6, 1, 2, 2)
    pool_labels = torch.tensor([[0, 1], [1, 1], [0, 1], [0, 0], [1, 0], [0, 1]])
    chosen = choose(torch.rand(1, 1, 2, 2), torch.tensor([[0, 1]]), pool, pool_labels, count=4)
    assert sorted(chosen[0].tolist()) == [0, 2, 5]


def test_too_small_a_pool_is_refused() -> None:
    image = torch.rand(1, 1, 2, 2)
    with pytest.raises(FedveilError, match="held-out examples"):
        choose(image, torch.zeros(1), image, torch.zeros(1))
    with pytest.raises(FedveilError, match="held-out examples"):
        choose(image, torch.zeros(1), image[:0], torch.zeros(0))
    with pytest.raises(FedveilError, match="at least 2"):
        choose(image, torch.zeros(1), image, torch.zeros(1), count=1)
