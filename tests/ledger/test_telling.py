"""What no attacker can tell of members under a guarantee: held against the best attacker there is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr

from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import Exposure
from fedveil.leakage.membership import AUC, told
from fedveil.ledger.picking import most_picked
from fedveil.ledger.statement import statement
from fedveil.ledger.telling import Curve, area, by_epsilon, by_gaussian, from_model, from_update

GIVEN = Exposure(parameters=100, rounds=3, steps_per_round=1, sampling_rate=1.0, example_rate=0.01)


def of_update(spec: str, views: int = 1) -> Curve | None:
    return from_update(statement(Chain.of(spec), GIVEN), GIVEN, views)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.1])
def test_by_epsilon_is_the_law_both_ways_round(epsilon: float, delta: float) -> None:
    curve = by_epsilon(epsilon, delta)
    for rate in (0.0, 0.001, 0.01, 0.3, 0.9, 1.0):
        assert curve(rate) <= math.exp(epsilon) * rate + delta + 1e-12
        # Who says "no member" where this one says "member" is bound, too.
        assert 1 - rate <= math.exp(epsilon) * (1 - curve(rate)) + delta + 1e-12
        assert rate <= curve(rate) <= 1


def test_the_best_attacker_on_laplace_noise_reaches_the_bound_and_none_is_above() -> None:
    """Randomized response at its one threshold meets e^ε·FPR; the optimal test on Laplace noise stays below it."""
    random, epsilon = np.random.default_rng(0), 1.0
    noisy = random.laplace(size=40_000) / epsilon
    kinds = np.r_[np.ones(20_000, int), np.zeros(20_000, int)]
    found = told((noisy + kinds)[None], kinds[None], resamples=100).metrics
    assert found["member_tpr_1"].mean == pytest.approx(by_epsilon(epsilon)(0.01), rel=0.15)
    assert found["member_tpr_1"].low <= by_epsilon(epsilon)(0.01)
    assert found[AUC].high < area(by_epsilon(epsilon)) + 0.01


def test_the_best_attacker_on_gaussian_noise_is_the_bound() -> None:
    random, mu = np.random.default_rng(0), 1.5
    kinds = np.r_[np.ones(20_000, int), np.zeros(20_000, int)]
    found = told((random.normal(size=40_000) + mu * kinds)[None], kinds[None], resamples=100).metrics
    assert found["member_tpr_1"].mean == pytest.approx(by_gaussian(mu)(0.01), rel=0.1)
    assert found[AUC].mean == pytest.approx(float(ndtr(mu / math.sqrt(2))), abs=0.01)
    assert area(by_gaussian(mu)) == pytest.approx(float(ndtr(mu / math.sqrt(2))), abs=1e-3)
    assert area(by_gaussian(mu)) >= ndtr(mu / math.sqrt(2))  # never less than was proven


@pytest.mark.parametrize("spec", ["dp-sgd:noise_multiplier=1,clip=1", "dp-clip:clip=1,sigma=4"])
@pytest.mark.parametrize("views", [1, 4])
def test_of_one_update_it_is_the_bound_of_the_link_test_at_as_many_candidates(spec: str, views: int) -> None:
    curve = of_update(spec, views)
    assert curve is not None
    assert curve(0.01) == pytest.approx(most_picked(statement(Chain.of(spec), GIVEN), GIVEN, 100, views))


def test_laplace_noise_on_the_whole_update() -> None:
    curve = of_update("dp-laplace:epsilon=2", 2)
    assert curve is not None
    assert curve(0.001) == pytest.approx(math.exp(4) * 0.001)


@pytest.mark.parametrize("spec", ["gradient-dropout", "duchi:epsilon=1", "spm:epsilon=1", "none"])
def test_no_bound_where_no_guarantee_covers_an_example(spec: str) -> None:
    promised = statement(Chain.of(spec), GIVEN)
    assert from_model(promised) is None
    assert from_update(promised, GIVEN) is None


def test_a_trusted_server_bounds_what_the_model_tells_and_not_what_it_sees_itself() -> None:
    promised = statement(Chain.of("cdp"), GIVEN)
    assert from_update(promised, GIVEN) is None
    assert from_model(promised) is not None


def test_of_the_model_it_is_the_epsilon_that_the_ledger_composed() -> None:
    promised = statement(Chain.of("dp-sgd:noise_multiplier=1,clip=1"), GIVEN)
    curve = from_model(promised)
    assert curve is not None
    assert promised.epsilon is not None
    assert promised.delta is not None
    assert curve(0.001) == pytest.approx(min(1.0, math.exp(promised.epsilon) * 0.001 + promised.delta))
