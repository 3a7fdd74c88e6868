"""Assignment against brute force over all permutations."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.leakage.assignment import assign, reorder


def total(found: Tensor, true: Tensor) -> float:
    return (found.double() - true.double()).square().sum().item()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), victims=st.integers(1, 3), batch=st.integers(1, 5), size=st.integers(1, 4))
def test_no_permutation_is_better(seed: int, victims: int, batch: int, size: int) -> None:
    random = torch.Generator().manual_seed(seed)
    found = torch.randn(victims, batch, 1, size, size, generator=random)
    true = torch.randn(victims, batch, 1, size, size, generator=random)
    ordered, permutation = assign(found, true)
    assert torch.equal(ordered, reorder(found, permutation))
    for victim in range(victims):
        assert sorted(permutation[victim].tolist()) == list(range(batch))
        best = min(total(found[victim, list(order)], true[victim]) for order in permutations(range(batch)))
        assert total(ordered[victim], true[victim]) == pytest.approx(best)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 40))
def test_a_shuffled_batch_is_put_back(seed: int, batch: int) -> None:
    random = torch.Generator().manual_seed(seed)
    true = torch.rand(1, batch, 1, 6, 6, generator=random)
    shuffle = torch.randperm(batch, generator=random)
    ordered, permutation = assign(true[:, shuffle], true)
    assert torch.equal(ordered, true)
    assert torch.equal(shuffle[permutation[0]], torch.arange(batch))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_diverged_reconstructions_take_what_the_others_leave(bad: float) -> None:
    true = torch.rand(1, 4, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    found = true[:, [2, 0, 3, 1]].clone()
    found[0, 1, 0, 0, 0] = bad  # the reconstruction of original 0
    found[0, 3] = bad  # of original 1
    _, permutation = assign(found, true)
    assert permutation[0, 2:].tolist() == [0, 2]
    assert sorted(permutation[0, :2].tolist()) == [1, 3]


def test_everything_diverged() -> None:
    _, permutation = assign(torch.full((2, 3, 1, 2, 2), float("nan")), torch.rand(2, 3, 1, 2, 2))
    assert permutation.sort(dim=1).values.tolist() == [[0, 1, 2]] * 2


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="victims, batch"):
        assign(torch.zeros(2, 3, 4), torch.zeros(2, 4, 4))
