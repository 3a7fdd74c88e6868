from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import FedveilError
from fedveil.tasks.partition import IID, Dirichlet, Partition, Shards, partitions
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


def complete(parts: tuple[torch.Tensor, ...], size: int) -> bool:
    whole = sorted(torch.cat(parts).tolist()) == list(range(size))
    return whole and all(len(part) and part.dtype == torch.int64 for part in parts)


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120),
    clients=st.integers(1, 12),
    alpha=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**70),
)
def test_dirichlet_is_disjoint_and_complete_or_says_why(
    labels: list[int], clients: int, alpha: float, seed: int
) -> None:
    partition = Dirichlet(alpha=alpha)
    try:
        parts = partition.assign(torch.tensor(labels), clients, seed)
    except FedveilError:
        # Only where it is hard: some client would have had nothing, in a hundred draws.
        assert clients > len(labels) / 20 or alpha < 1
        return
    assert len(parts) == clients
    assert complete(parts, len(labels))
    again = partition.assign(torch.tensor(labels), clients, seed)
    assert all(a.equal(b) for a, b in zip(parts, again, strict=True))


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120),
    clients=st.integers(1, 12),
    per_client=st.integers(1, 4),
    seed=st.integers(0, 2**70),
)
def test_shards_are_disjoint_complete_and_even(labels: list[int], clients: int, per_client: int, seed: int) -> None:
    partition = Shards(per_client=per_client)
    if clients * per_client > len(labels):
        with pytest.raises(FedveilError, match="use fewer clients"):
            partition.assign(torch.tensor(labels), clients, seed)
        return
    parts = partition.assign(torch.tensor(labels), clients, seed)
    assert complete(parts, len(labels))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= per_client


LABELS = torch.arange(1000) % 10


def kinds(parts: tuple[torch.Tensor, ...]) -> list[int]:
    return [len(LABELS[part].unique()) for part in parts]


def test_two_shards_of_even_classes_are_at_most_two_classes() -> None:
    assert max(kinds(Shards().assign(LABELS, 5, 0))) <= 2
    assert kinds(Shards(per_client=1).assign(LABELS, 10, 0)) == [1] * 10


def test_alpha_goes_from_single_classes_to_even_ones() -> None:
    def spread(alpha: float) -> float:
        parts = Dirichlet(alpha=alpha).assign(LABELS, 4, 0)
        table = torch.stack([torch.bincount(LABELS[part], minlength=10) for part in parts]).double()
        return float((table / 100).std(0, correction=0).mean())

    assert spread(1e4) < 0.02 < spread(1.0) < spread(0.1)
    # The variance of a share is that of the Dirichlet distribution: (1/K)(1 − 1/K) / (K·alpha + 1).
    shares = [float((LABELS[part] == 0).sum()) / 100 for s in range(300) for part in Dirichlet().assign(LABELS, 4, s)]
    assert np.var(shares) == pytest.approx(0.25 * 0.75 / 3, rel=0.1)


@pytest.mark.parametrize("partition", [Dirichlet(), Shards()])
def test_uneven_partitions_follow_their_seed(partition: Partition) -> None:
    first, again, other = (partition.assign(LABELS, 4, seed) for seed in (0, 0, 1))
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not all(a.equal(b) for a, b in zip(first, other, strict=True))


def test_every_client_has_as_many_as_asked_for_or_there_is_one_line() -> None:
    parts = Dirichlet(alpha=0.5, least=50).assign(LABELS, 4, 0)
    assert min(map(len, parts)) >= 50
    with pytest.raises(FedveilError, match=r"alpha=0.01 leaves one of 100 clients with fewer than 1 of 1000 examples"):
        Dirichlet(alpha=0.01).assign(LABELS, 100, 0)


def test_partitions_as_users_write_them() -> None:
    assert partitions.parse("dirichlet:alpha=0.3") == Dirichlet(alpha=0.3)
    assert partitions.spell(Shards(per_client=3)) == "shards:per_client=3"
    for wrong in ("dirichlet:alpha=0", "shards:per_client=0", "dirichlet:beta=1"):
        with pytest.raises(FedveilError):
            partitions.parse(wrong)
