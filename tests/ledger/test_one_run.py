"""The lower bound of ε from one run: its closed form, and that it is one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from fedveil.defenses.dp_gaussian import gaussian_epsilon
from fedveil.ledger.one_run import chance_of_right, guess_counts, least_epsilon


@pytest.mark.parametrize(
    "canaries, guesses, right, epsilon, delta", [(100, 20, 17, 0.7, 1e-3), (50, 50, 30, 0.0, 1e-2)]
)
def test_the_closed_form_is_that_of_the_theorem(
    canaries: int, guesses: int, right: int, epsilon: float, delta: float
) -> None:
    p = np.exp(epsilon) / (1 + np.exp(epsilon))
    chance = [float(binom.pmf(count, guesses, p)) for count in range(guesses + 1)]
    alpha = max(sum(chance[max(right - i, 0) : right]) * 2 / i for i in range(1, canaries + 1))
    expected = sum(chance[right:]) + delta * canaries * alpha
    assert chance_of_right(canaries, guesses, right, epsilon, delta) == pytest.approx(min(expected, 1.0))


def test_the_bound_is_where_the_chance_is_the_doubt() -> None:
    found = least_epsilon(1000, 100, 95, 1e-6)
    assert chance_of_right(1000, 100, 95, found, 1e-6) == pytest.approx(0.05, rel=1e-2)
    assert least_epsilon(1000, 100, 50, 1e-6) == 0.0
    assert least_epsilon(1000, 100, 100, 0.0) == pytest.approx(np.log(0.05**0.01 / (1 - 0.05**0.01)), abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.integers(10, 300), st.floats(0, 1), st.floats(0, 0.01))
def test_more_right_guesses_show_more_and_more_delta_shows_less(guesses: int, share: float, delta: float) -> None:
    right = int(share * (guesses - 1))
    assert least_epsilon(500, guesses, right, delta) <= least_epsilon(500, guesses, right + 1, delta) + 1e-3
    assert least_epsilon(500, guesses, right, 2 * delta) <= least_epsilon(500, guesses, right, delta) + 1e-3


def test_randomized_response_is_hardly_ever_called_broken() -> None:
    epsilon, random = 1.0, np.random.default_rng(0)
    right = random.binomial(300, np.exp(epsilon) / (1 + np.exp(epsilon)), 400)
    above = [least_epsilon(300, 300, int(each), 0.0) > epsilon for each in right]
    assert 0.01 < np.mean(above) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)  # as often as the confidence says, no more


def test_gaussian_noise_stays_below_its_epsilon() -> None:
    random, most = np.random.default_rng(1), gaussian_epsilon(1e-5, 1.0)
    for _ in range(30):
        coins = random.choice([-1, 1], 1000)
        seen = random.standard_normal(1000) + coins / 2
        sure = np.argsort(-np.abs(seen))
        for guesses in guess_counts(1000):
            assert least_epsilon(1000, guesses, int((seen * coins > 0)[sure[:guesses]].sum()), 1e-5) < most


def test_guesses_are_few_and_never_more_than_canaries() -> None:
    assert guess_counts(10) == (10,)
    assert guess_counts(1000) == (10, 30, 100, 300)
