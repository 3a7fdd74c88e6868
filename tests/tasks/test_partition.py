from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import FedveilError
from fedveil.tasks.partition import IID
from fedveil.tasks.randomness import derived_key, generator


@settings(deadline=None)  # others may share the machine
@given(size=st.integers(1, 200), data=st.data(), seed=st.integers(0, 2**70))
def test_iid_is_disjoint_complete_and_even(size: int, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, size))
    parts = IID().assign(torch.zeros(size), clients, seed)
    assert len(parts) == clients
    assert sorted(torch.cat(parts).tolist()) == list(range(size))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert all(part.dtype == torch.int64 for part in parts)


def test_iid_follows_its_seed() -> None:
    first, again, other = (torch.cat(IID().assign(torch.zeros(100), 4, seed)) for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)
    assert not first.equal(torch.arange(100))


@pytest.mark.parametrize("clients, line", [(0, "at least 1"), (6, "6 clients cannot share 5 training examples")])
def test_impossible_numbers_of_clients(clients: int, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        IID().assign(torch.zeros(5), clients, 0)


def test_purposes_and_large_seeds_draw_apart() -> None:
    keys = {derived_key(0, "partition"), derived_key(0, "split"), derived_key(2**32, "partition"), derived_key(1, "0")}
    assert len(keys) == 4
    assert derived_key(1, "23") != derived_key(12, "3")
    assert max(keys) > 2**64  # the key uses all 128 bits
    draws = [generator(seed, "split").integers(0, 2**63, 4) for seed in (0, 2**64)]
    assert not np.array_equal(*draws)
