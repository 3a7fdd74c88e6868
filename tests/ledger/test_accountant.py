"""What mechanisms spend, against dp-accounting itself, published values, and formulas written out here."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy.special import gammaln, logsumexp

from fedveil.defenses.dp_gaussian import gaussian_delta
from fedveil.defenses.guarantee import GaussianRelease, LaplaceRelease
from fedveil.ledger.accountant import pure_epsilon, spent, worst

# The MNIST tutorial of TensorFlow Privacy: batches of 256 of 60,000 over 60 epochs.
TUTORIAL = GaussianRelease(1.1, 60 * 60_000 // 256, 256 / 60_000)


def renyi(rate, multiplier, order):
    """Mironov, Talwar & Zhang 2019 (Opacus' formula too), for whole orders: the Rényi divergence of one step."""
    k = np.arange(order + 1)
    choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = choose + k * np.log(rate) + (order - k) * np.log1p(-rate) + (k * k - k) / (2 * multiplier**2)
    return logsumexp(terms) / (order - 1)


def renyi_epsilon(mechanism, delta, *, improved):
    found = []
    for order in range(2, 200):
        total = mechanism.releases * renyi(mechanism.sampling_rate, mechanism.noise_multiplier, order)
        if improved:  # Balle et al. 2020, as Opacus and dp-accounting convert today
            total += math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        else:  # Mironov 2017, as in the tutorial
            total += math.log(1 / delta) / (order - 1)
        found.append(total)
    return min(found)


def test_the_published_value_of_the_tutorial():
    assert renyi_epsilon(TUTORIAL, 1e-5, improved=False) == pytest.approx(3.0, abs=0.1)  # as printed there
    found = spent(TUTORIAL, 1e-5)
    assert found.how == "PLD accountant"
    # The fine-grained accountant proves a smaller ε than Rényi divergences, and not by far.
    assert 0.85 * renyi_epsilon(TUTORIAL, 1e-5, improved=True) < found.epsilon
    assert found.epsilon < renyi_epsilon(TUTORIAL, 1e-5, improved=True)


@pytest.mark.parametrize("mechanism", [TUTORIAL, GaussianRelease(1.0, 300, 0.02), GaussianRelease(0.8, 50, 0.3)])
def test_the_same_as_dp_accounting(mechanism):
    accountant = dp_accounting.pld.PLDAccountant()
    event = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(mechanism.sampling_rate, event), mechanism.releases)
    assert spent(mechanism, 1e-5).epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize("multiplier, releases", [(1.0, 1), (1.0, 100), (30.0, 900), (1e-3, 5)])
def test_without_sampling_composition_is_exact(multiplier, releases):
    found = spent(GaussianRelease(multiplier, releases), 1e-5)
    assert found.how == "exact Gaussian composition"
    assert gaussian_delta(found.epsilon, multiplier / math.sqrt(releases)) == pytest.approx(1e-5, rel=1e-4)


def test_without_sampling_it_agrees_with_the_fine_grained_accountant():
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(4.0), 30)
    assert spent(GaussianRelease(4.0, 30), 1e-5).epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def test_tiny_noise_is_accounted_quickly_and_is_enormous():
    found = spent(GaussianRelease(1e-3, 240, 0.1), 1e-5)  # FedEM's text setting
    assert found.epsilon > 1e6
    assert math.isfinite(found.epsilon)


def test_a_fixed_number_of_clients_is_not_taken_for_poisson_sampling():
    fixed = spent(GaussianRelease(2.0, 30, 0.1, "fixed"), 1e-5)
    poisson = spent(GaussianRelease(2.0, 30, 0.1), 1e-5)
    whole = spent(GaussianRelease(2.0, 30), 1e-5)
    assert poisson.epsilon < fixed.epsilon < whole.epsilon
    assert "without replacement" in fixed.how
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 100, dp_accounting.GaussianDpEvent(2.0))
    assert fixed.epsilon == pytest.approx(accountant.compose(event, 30).get_epsilon(1e-5))


def test_sampling_that_proves_nothing_is_left_out():
    assert spent(GaussianRelease(2.0, 30, 0.99, "fixed"), 1e-5) == spent(GaussianRelease(2.0, 30), 1e-5)


# ---- pure mechanisms --------------------------------------------------------------------------------------


def test_a_few_pure_releases_add_up():
    found = spent(LaplaceRelease(0.5, 3), 1e-5)
    assert (found.epsilon, found.delta, found.how) == (1.5, 0.0, "basic composition")
    assert spent(LaplaceRelease(8.0, 1), 1e-5).epsilon == 8.0
    assert spent(LaplaceRelease(100.0, 4), 1e-5).epsilon == 400.0


@pytest.mark.parametrize("epsilon, releases", [(0.1, 300), (0.5, 40), (0.02, 500), (1.0, 60)])
def test_many_pure_releases_cost_less_at_delta(epsilon, releases):
    found = spent(LaplaceRelease(epsilon, releases), 1e-5)
    assert found.delta == 1e-5
    assert found.epsilon < 0.99 * epsilon * releases
    # Randomized response with two answers, in dp-accounting, rounded up on a fine grid.
    response = dp_accounting.pld.privacy_loss_distribution.from_randomized_response(
        2 / (1 + math.exp(epsilon)), 2, value_discretization_interval=epsilon / 2000
    )
    library = response.self_compose(releases).get_epsilon_for_delta(1e-5)
    assert found.epsilon <= library + 1e-9
    assert found.epsilon == pytest.approx(library, rel=0.02)


def test_two_pure_releases_by_hand():
    """Both answers agree with the truth with chance p² = 16/25 at ε = ln 4: δ = p²·(1 - e^(ε' - 2 ln 4))."""
    epsilon, target = math.log(4), 2 * math.log(4) + math.log(1 - 0.1 / 0.64)
    assert pure_epsilon(epsilon, 2, 0.1) == pytest.approx(target)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_laplace_noise_itself_never_spends_more(epsilon):
    laplace = dp_accounting.pld.privacy_loss_distribution.from_laplace_mechanism(1 / epsilon, sensitivity=1.0)
    own = laplace.self_compose(40).get_epsilon_for_delta(1e-5)
    assert own <= spent(LaplaceRelease(epsilon, 40), 1e-5).epsilon + 1e-3


def test_nothing_released_is_nothing_spent():
    assert spent(GaussianRelease(1.0, 0), 1e-5).epsilon == 0.0


# ---- several clients --------------------------------------------------------------------------------------


def test_the_worst_off_client_counts():
    rates = {0.4: 3, 0.1: 10, 0.02: 50}  # epochs over fewer or more examples
    each = [GaussianRelease(2.0, 3 * steps, rate) for rate, steps in rates.items()]
    assert worst(each, 1e-5) == max((spent(one, 1e-5) for one in each), key=lambda found: found.epsilon)
    assert worst([LaplaceRelease(1.0, 2), LaplaceRelease(1.0, 5)], 1e-5) == spent(LaplaceRelease(1.0, 5), 1e-5)
