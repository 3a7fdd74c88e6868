"""The n-gram model against its closed form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.attacks.ngram import DISCOUNT, KneserNey

ENTRIES = 6
SENTENCES = st.lists(st.lists(st.integers(0, ENTRIES - 1), max_size=6), max_size=8)


@given(SENTENCES, st.lists(st.integers(0, ENTRIES - 1), max_size=3))
def test_what_may_follow_has_probability_one(sentences: list[list[int]], context: list[int]) -> None:
    model = KneserNey.trained(sentences, ENTRIES)
    for before in (tuple(context), (model.begin, model.begin), (model.begin, *context)):
        total = sum(model.probability(token, before) for token in range(ENTRIES + 1))
        assert total == pytest.approx(1, abs=1e-12)


def test_a_small_corpus_by_hand() -> None:
    """Of "0 1" and "2 1": 1 follows two tokens, so among single tokens it counts twice."""
    model = KneserNey.trained([[0, 1], [2, 1]], 3)
    # Single tokens: 0 and 2 follow the beginning, 1 follows 0 and 2, the end follows 1: five pairs of four kinds.
    even = 1 / 4
    single = {token: (count - DISCOUNT + DISCOUNT * 4 * even) / 5 for token, count in {0: 1, 1: 2, 2: 1, 3: 1}.items()}
    assert model.probability(1, ()) == pytest.approx(single[1])
    # Behind 0 comes 1 alone: it was seen behind one other context.
    behind = (1 - DISCOUNT) + DISCOUNT * single[1]
    assert model.probability(1, (0,)) == pytest.approx(behind)
    assert model.probability(2, (0,)) == pytest.approx(DISCOUNT * single[2])
    whole = (1 - DISCOUNT) + DISCOUNT * behind
    assert model.probability(1, (model.begin, 0)) == pytest.approx(whole)
    assert model.probability(1, (2, 2)) == pytest.approx(model.probability(1, (2,)))  # a pair that was never seen


def test_sentences_that_were_seen_cost_less_than_their_tokens_in_another_order() -> None:
    model = KneserNey.trained([[0, 1, 2, 3], [0, 1, 2, 4]], 5)
    assert model.nats([0, 1, 2, 3]) < model.nats([2, 0, 3, 1])
    assert model.nats([]) == pytest.approx(-math.log(model.probability(model.end, (model.begin, model.begin))))


def test_a_model_is_the_same_after_it_was_kept() -> None:
    model = KneserNey.trained([[0, 1, 1], [4, 0, 1]], 5)
    again = KneserNey.of(model.tensors, 5)
    assert [again.nats(each) for each in ([0, 1], [3], [4, 0, 1])] == [
        model.nats(each) for each in ([0, 1], [3], [4, 0, 1])
    ]
