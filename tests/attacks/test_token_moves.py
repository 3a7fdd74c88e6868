"""Moves of tokens: whatever is drawn, a sentence keeps its tokens, and places that are given stay."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.attacks.token_moves import DRAWS, moved, rearrangements

SHARE = st.floats(0, 1, exclude_max=True)


@given(st.integers(0, 3), st.integers(0, 9), st.tuples(SHARE, SHARE, SHARE))
def test_every_token_stays_once(kind: int, size: int, draws: tuple[float, float, float]) -> None:
    assert sorted(moved(kind, size, draws)) == list(range(size))


def test_every_kind_of_move_changes_something() -> None:
    for kind in range(4):
        drawn = torch.rand(50, 3, generator=torch.Generator().manual_seed(kind)).tolist()
        assert len({tuple(moved(kind, 5, each)) for each in drawn}) >= 4


def test_one_sentence_moves_at_a_time_between_its_ends() -> None:
    draws = torch.rand(200, DRAWS, generator=torch.Generator().manual_seed(0))
    orders = rearrangements([(1, 5), (1, 3)], 7, draws)
    places = torch.arange(14)
    assert torch.equal(orders[0], places)
    free = torch.tensor([1, 2, 3, 4, 8, 9])
    fixed = torch.tensor([place for place in places.tolist() if place not in free.tolist()])
    assert torch.equal(orders[:, fixed], fixed.expand(200, -1))
    assert torch.equal(orders[:, 1:5].sort(1).values, places[1:5].expand(200, -1))
    changed = orders != places
    assert changed[:, 1:5].any(1).any()
    assert changed[:, 8:10].any(1).any()
    assert not (changed[:, 1:5].any(1) & changed[:, 8:10].any(1)).any()
