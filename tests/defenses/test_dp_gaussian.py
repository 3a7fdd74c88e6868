"""The calibrated Gaussian mechanism: its noise against the exact δ, and where the classical formula fails."""

import math

import dp_accounting
import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.defenses.dp_gaussian import (
    DPGaussian,
    classical_limit,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_multiplier,
)
from fedveil.defenses.guarantee import GaussianRelease
from fedveil.errors import FedveilError
from fedveil.tree import Tree

from .laws import EXPOSURE, make_call


def exact_delta(epsilon, multiplier):
    """Balle & Wang 2018, Theorem 8, with 60 digits."""
    with mpmath.workdps(60):
        epsilon, shift = mpmath.mpf(epsilon), 1 / mpmath.mpf(multiplier)
        return mpmath.ncdf(shift / 2 - epsilon / shift) - mpmath.exp(epsilon) * mpmath.ncdf(
            -shift / 2 - epsilon / shift
        )


@settings(max_examples=100, deadline=None)
@given(epsilon=st.floats(1e-3, 500), log_delta=st.floats(-12, -1))
def test_the_noise_is_the_least_that_gives_epsilon_and_delta(epsilon, log_delta):
    delta = 10**log_delta
    multiplier = gaussian_multiplier(epsilon, delta)
    assert exact_delta(epsilon, multiplier) <= delta * (1 + 1e-6)
    assert exact_delta(epsilon, multiplier * (1 - 1e-5)) > delta


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_the_same_as_dp_accounting(epsilon, delta):
    multiplier = gaussian_multiplier(epsilon, delta)
    assert multiplier == pytest.approx(dp_accounting.get_sigma_gaussian(epsilon, delta), rel=1e-4)
    assert gaussian_epsilon(delta, multiplier) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("epsilon, multiplier", [(0.0, 1.0), (1.0, 1.0), (5.0, 0.3), (40.0, 0.2), (0.1, 50.0)])
def test_delta_keeps_its_digits(epsilon, multiplier):
    assert gaussian_delta(epsilon, multiplier) == pytest.approx(float(exact_delta(epsilon, multiplier)), rel=1e-8)


def test_much_noise_needs_no_epsilon_at_all():
    assert gaussian_epsilon(1e-2, 1e3) == 0.0


def test_tiny_noise_has_an_enormous_but_finite_epsilon():
    assert gaussian_epsilon(1e-5, 1e-3) == pytest.approx(5e5, rel=0.01)  # 1/(2·multiplier²), and a little


def test_the_classical_formula_wastes_noise_at_small_epsilon_and_breaks_at_large():
    delta = 1e-5

    def classical(epsilon):
        return math.sqrt(2 * math.log(1.25 / delta)) / epsilon

    assert classical(0.5) > gaussian_multiplier(0.5, delta)
    assert exact_delta(0.5, classical(0.5)) < delta
    for epsilon in (9.0, 20.0, 100.0):
        assert classical(epsilon) < gaussian_multiplier(epsilon, delta)
        assert exact_delta(epsilon, classical(epsilon)) > delta  # what it would promise is not true
    assert exact_delta(20.0, classical(20.0)) > 10 * delta


def test_the_update_is_cut_and_the_noise_is_as_calibrated():
    defense = DPGaussian(epsilon=3.0, delta=1e-6, clip=0.7)
    assert defense.sigma == pytest.approx(1.4 * gaussian_multiplier(3.0, 1e-6))
    update = Tree({"w": torch.full((2, 10_000), 1.0)})
    shared = defense.protect(update, make_call(clients=2))
    for client in (shared["w"] - 0.7 / 100).numpy():
        assert stats.kstest(client, stats.norm(scale=defense.sigma).cdf).pvalue > 1e-4


def test_the_ledger_is_told():
    promise = DPGaussian(epsilon=2.0, clip=123.0).guarantee(EXPOSURE)
    assert promise.mechanism == GaussianRelease(gaussian_multiplier(2.0, 1e-5), 10)
    assert promise.protects == "all data of a client"


@pytest.mark.parametrize("field", [{"epsilon": 0}, {"delta": 0}, {"delta": 1}, {"clip": 0}])
def test_fields_out_of_range_are_refused(field):
    with pytest.raises(FedveilError, match=next(iter(field))):
        DPGaussian(**field)


@pytest.mark.parametrize("delta, limit", [(1e-2, 6.77), (1e-5, 8.42), (1e-9, 9.62)])
def test_the_classical_noise_is_too_little_from_the_limit_on_and_not_before(delta, limit):
    assert classical_limit(delta) == pytest.approx(limit, abs=0.01)
    root = math.sqrt(2 * math.log(1.25 / delta))
    for epsilon in (0.1, 1.0, 0.999 * classical_limit(delta)):
        assert gaussian_multiplier(epsilon, delta) < root / epsilon
    for epsilon in (1.001 * classical_limit(delta), 20.0, 500.0):
        assert gaussian_multiplier(epsilon, delta) > root / epsilon
