"""Telling members from others: the numbers of another implementation, honest intervals, and nothing out of nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import roc_auc_score, roc_curve

from fedveil.errors import FedveilError
from fedveil.leakage import membership
from fedveil.leakage.membership import AUC, CHANCE, RATES, others_needed, told


def drawn(members: int, others: int, shift: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    kinds = random.permutation(np.r_[np.ones(members, int), np.zeros(others, int)])[None]
    return random.normal(size=kinds.shape) + shift * kinds, kinds


@given(arrays(np.int64, 60, elements=st.integers(0, 12)), st.integers(1, 59))
def test_as_scikit_learn_also_where_scores_are_equal(scores: np.ndarray, members: int) -> None:
    kinds = np.r_[np.ones(members, int), np.zeros(60 - members, int)]
    found = told(scores[None], kinds[None], resamples=20)
    assert found.metrics[AUC].mean == pytest.approx(roc_auc_score(kinds, scores))
    alarms, members_found, _ = roc_curve(kinds, scores, drop_intermediate=False)
    ours = dict(zip(*found.curve, strict=True))  # of equal false alarms the last, which finds most
    for rate in np.unique(alarms):
        best = max(share for alarm, share in ours.items() if alarm <= rate + 1e-12)
        assert best == pytest.approx(members_found[alarms <= rate].max())


def test_shares_at_few_false_alarms_as_scikit_learn() -> None:
    scores, kinds = drawn(300, 12_000, 2.0)
    alarms, members_found, _ = roc_curve(kinds[0], scores[0], drop_intermediate=False)
    found = told(scores, kinds, resamples=50)
    for name, rate in RATES.items():
        assert found.metrics[name].mean == pytest.approx(members_found[alarms <= rate].max())
    assert 0.05 < found.metrics["member_tpr_01"].mean < found.metrics["member_tpr_1"].mean < 0.9


def test_a_share_is_not_measured_with_too_few_others() -> None:
    assert (others_needed("member_tpr_1"), others_needed("member_tpr_01")) == (1000, 10_000)
    assert told(*drawn(20, 999, 1.0)).metrics.keys() == {AUC}
    assert told(*drawn(20, 1000, 1.0)).metrics.keys() == {AUC, "member_tpr_1"}


def test_the_intervals_hold_what_they_promise() -> None:
    true = 0.7602  # of normal scores one standard deviation apart
    covered = [
        found.low <= true <= found.high
        for seed in range(60)
        if (found := told(*drawn(60, 80, 1.0, seed), resamples=300).metrics[AUC])
    ]
    assert 0.85 <= np.mean(covered) <= 1


def test_both_members_and_others_make_the_interval_wide() -> None:
    few, many = (told(*drawn(400, others, 1.0)).metrics[AUC] for others in (40, 4000))
    assert few.high - few.low > 1.5 * (many.high - many.low)


def test_members_of_one_update_stand_or_fall_together() -> None:
    random = np.random.default_rng(3)
    kinds = np.full((6, 6 * 10 + 50), membership.LEFT_OUT)
    for row in range(6):
        kinds[row, row * 10 : row * 10 + 10] = membership.MEMBER
    kinds[:, 60:] = membership.OTHER
    scores = random.normal(size=kinds.shape)
    for row in range(3):  # half of the updates give all of their members away
        scores[row, row * 10 : row * 10 + 10] += 10
    together = told(scores, kinds).metrics[AUC]
    assert together.count == 60
    assert together.high - together.low > 0.3


def test_no_membership_no_leak() -> None:
    """The mechanism: members and others of one law, or with their names exchanged, are told by chance."""
    scores, kinds = drawn(500, 1000, 3.0)
    shuffled = np.random.default_rng(1).permutation(kinds, axis=1)
    found = told(scores, shuffled).metrics
    for name, chance in CHANCE.items():
        assert name not in found or found[name].low <= chance <= found[name].high
    assert told(scores, kinds).metrics[AUC].mean > 0.95


def test_perfect_scores_of_few_members_prove_little() -> None:
    found = told(*drawn(5, 50, 100.0)).metrics[AUC]
    assert found.mean == found.high == 1
    assert 0.6 < found.low < 0.9
    assert told(-drawn(5, 50, 100.0)[0], drawn(5, 50, 100.0)[1]).metrics[AUC].high < 0.4


def test_all_at_once_or_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, kinds = drawn(50, 1000, 1.0)
    whole = told(scores.round(1), kinds)
    monkeypatch.setattr(membership, "MOST_PAIRS", 7000)
    parts = told(scores.round(1), kinds)
    for name, found in whole.metrics.items():
        assert parts.metrics[name].low == pytest.approx(found.low, abs=1e-6)
        assert parts.metrics[name].high == pytest.approx(found.high, abs=1e-6)


def test_what_is_not_a_number_is_the_least() -> None:
    assert told([[np.nan, 1.0, 0.0]], [[1, 0, 0]]).metrics[AUC].mean == 0
    assert told([[np.inf, 1.0, 0.0]], [[1, 0, 0]]).metrics[AUC].mean == 1


@pytest.mark.parametrize(
    "scores, kinds", [([[1.0, 2.0]], [[1, 1]]), ([[1.0, 2.0]], [[0, 0]]), ([[1.0]], [[1, 0]]), ([1.0], [1])]
)
def test_what_cannot_be_told_is_refused(scores: list, kinds: list) -> None:
    with pytest.raises(FedveilError, match=r"members|kind"):
        told(scores, kinds)
