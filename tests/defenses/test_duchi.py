"""Duchi et al.: two values, exact odds, and a likelihood ratio within e^ε for any two entries."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fedveil as fv
from fedveil.defenses.base import Facts
from fedveil.defenses.duchi import Duchi
from fedveil.defenses.guarantee import PureLDP
from fedveil.errors import FedveilError
from fedveil.tree import Tree

from .laws import EXPOSURE, call_of, make_batch, make_call
from .moments import assert_variance

BUDGETS = pytest.mark.parametrize("epsilon", [0.3, 1.5, 5.0])


def draws(defense, value, count=200_000, dtype=torch.float64):
    update = Tree({"w": torch.full((1, count), value, dtype=dtype)})
    return defense.protect(update, make_call(clients=1))["w"][0]


def plus(t, epsilon):
    """P(+) of the clamped t, as the paper writes it."""
    t, e = max(-1.0, min(1.0, t)), math.exp(epsilon)
    return 0.5 + t * (e - 1) / (2 * (e + 1))


@BUDGETS
@pytest.mark.parametrize("bound", [1.0, 0.2])
@pytest.mark.parametrize("t", [-1.0, -0.3, 0.0, 0.6, 1.0])
def test_support_mean_variance_and_odds(epsilon, bound, t):
    sent = draws(Duchi(epsilon=epsilon, bound=bound), t * bound)
    c = (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
    torch.testing.assert_close(sent.abs(), torch.full_like(sent, bound * c))
    variance = bound**2 * (c**2 - t**2)
    assert abs(float(sent.mean()) - t * bound) < 4.5 * (variance / len(sent)) ** 0.5
    assert_variance(sent, variance)
    counts = [int((sent > 0).sum()), int((sent < 0).sum())]
    expected = [len(sent) * plus(t, epsilon), len(sent) * (1 - plus(t, epsilon))]
    assert stats.chisquare(counts, expected).pvalue > 1e-4


@given(epsilon=st.floats(1e-3, 15), t=st.floats(-2, 2), other=st.floats(-2, 2))
def test_the_likelihood_ratio_of_any_two_inputs_is_bounded(epsilon, t, other):
    for first, second in ((plus(t, epsilon), plus(other, epsilon)), (1 - plus(t, epsilon), 1 - plus(other, epsilon))):
        assert first <= math.exp(epsilon) * second * (1 + 1e-6)


@pytest.mark.parametrize("epsilon", [0.3, 1.5])
def test_the_bound_is_reached_by_the_samples_at_the_ends(epsilon):
    high, low = ((draws(Duchi(epsilon=epsilon), t) > 0).double().mean() for t in (1.0, -1.0))
    assert math.log(high / low) == pytest.approx(epsilon, abs=0.03)


@pytest.mark.parametrize("value", [5.0, -1e6])
def test_values_beyond_the_bound_are_those_at_the_bound(value):
    defense = Duchi(epsilon=0.7, bound=0.5)
    assert torch.equal(draws(defense, value, 1000), draws(defense, math.copysign(0.5, value), 1000))


@given(
    epsilon=st.floats(1e-3, 50),
    bound=st.floats(1e-6, 1e6),
    value=st.floats(-1e6, 1e6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_support_at_any_budget_and_value(epsilon, bound, value, dtype):
    sent = draws(Duchi(epsilon=epsilon, bound=bound), value, 100, dtype)
    assert sent.dtype == dtype
    torch.testing.assert_close(sent.abs().double(), torch.full((100,), bound / math.tanh(epsilon / 2)).double())


def test_the_guarantee():
    promise = Duchi(epsilon=2).guarantee(EXPOSURE)
    assert promise.sentence.endswith("ε = 2 per entry and round; any two values of one entry are covered.")
    assert promise.mechanism == PureLDP(2, coordinates=1000)


def test_gradients_are_refused_in_one_line():
    with pytest.raises(FedveilError, match=r"duchi protects weights .*gradient: use the protocol fedavg"):
        fv.federate(fv.task("digits", model="mlp", clients=2, limit=40), Duchi(), fv.FederationSettings(rounds=1))


@BUDGETS
@pytest.mark.parametrize("kind", ["weights", "delta"])
def test_the_informed_estimate_is_closer(epsilon, kind):
    generator = torch.Generator().manual_seed(0)
    truth = Tree({"w": torch.randn(2, 20_000, generator=generator), "b": torch.randn(2, 50, generator=generator)})
    before, lr = Tree({n: 0.3 * torch.randn(t.shape, generator=generator) for n, t in truth.items()}), 0.1
    facts, defense = Facts(kind=kind, lr=lr, steps=2), Duchi(epsilon=epsilon)
    batch = make_batch(clients=2)
    if kind == "weights":
        observed = (before - defense.protect(before - truth * (2 * lr), call_of(batch))) / (2 * lr)
    else:
        observed = -defense.protect(-truth * (2 * lr), call_of(batch)) / (2 * lr)
    known = defense.knowledge(observed, facts)
    assert (known.target - truth).norm().sum() < 0.5 * (observed - truth).norm().sum()


def test_measures():
    said = Duchi(epsilon=0.3, bound=0.5).measures(Tree({"w": torch.ones(1, 3)}))
    assert said["range factor C"] == pytest.approx(6.7166, abs=1e-3)
    assert said["predicted standard deviation of an entry"] == pytest.approx(6.7166 / 2, abs=1e-3)
    assert said["clients whose mean has a standard deviation of a tenth of the range"] == pytest.approx(4511, abs=1)


@pytest.mark.parametrize("upload", ["weights", "delta"])
def test_a_round_on_digits(upload):
    task = fv.task("digits", model="mlp", clients=4, limit=200)
    plan = fv.FederationSettings(protocol="fedavg", rounds=1, batch_size=16, upload=upload)
    run = fv.federate(task, "duchi:epsilon=2,bound=0.2", plan)
    assert all(torch.isfinite(p).all() for p in run.params.values())
