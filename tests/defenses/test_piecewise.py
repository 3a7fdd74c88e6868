"""PM: the exact density, its moments, and a likelihood ratio within e^ε for any two entries."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fedveil as fv
from fedveil.defenses.base import Facts
from fedveil.defenses.guarantee import PureLDP
from fedveil.defenses.piecewise import PM, likely_entry
from fedveil.errors import FedveilError
from fedveil.tree import Tree

from .laws import EXPOSURE, make_call
from .moments import assert_variance

BUDGETS = pytest.mark.parametrize("epsilon", [0.3, 1.5, 9.0])
INSIDE = pytest.mark.parametrize("t", [-1.0, -0.4, 0.0, 0.7, 1.0])


def draws(defense, value, count=200_000, dtype=torch.float64):
    update = Tree({"w": torch.full((1, count), value, dtype=dtype)})
    return defense.protect(update, make_call(clients=1))["w"][0]


def pieces(t, epsilon):
    """C, ℓ and r, as the paper writes them."""
    t, e = max(-1.0, min(1.0, t)), math.exp(epsilon / 2)
    c = (e + 1) / (e - 1)
    low = (c + 1) / 2 * t - (c - 1) / 2
    return c, low, low + c - 1


def density(y, t, epsilon):
    c, low, high = pieces(t, epsilon)
    e = math.exp(epsilon / 2)
    if not -c <= y <= c:
        return 0.0
    return e / (e + 1) / (c - 1) if low <= y <= high else 1 / (e + 1) / (c + 1)


@BUDGETS
@INSIDE
@pytest.mark.parametrize("bound", [1.0, 0.2])
def test_support_mean_and_variance(epsilon, t, bound):
    sent = draws(PM(epsilon=epsilon, bound=bound), t * bound)
    c, _, _ = pieces(t, epsilon)
    assert sent.abs().max() <= bound * c * (1 + 1e-12)
    e = math.exp(epsilon / 2)
    variance = bound**2 * (t**2 / (e - 1) + (e + 3) / (3 * (e - 1) ** 2))
    assert abs(float(sent.mean()) - t * bound) < 4.5 * (variance / len(sent)) ** 0.5
    assert_variance(sent, variance)
    if t == 0:
        assert PM(epsilon=epsilon, bound=bound).base_variance == pytest.approx(variance)


@BUDGETS
@INSIDE
def test_samples_follow_the_exact_density(epsilon, t):
    sent = draws(PM(epsilon=epsilon), t)
    c, low, high = pieces(t, epsilon)
    ends = sorted({-c, low, high, c})
    edges = torch.cat([torch.linspace(a, b, 13, dtype=torch.float64)[:-1] for a, b in itertools.pairwise(ends)])
    edges = torch.cat([edges, torch.tensor([c + 1e-9], dtype=torch.float64)])
    edges = edges[torch.cat([edges.diff() > 1e-9, torch.tensor([True])])]
    edges[0] = -c - 1e-9
    middles = (edges[1:] + edges[:-1]) / 2
    expected = torch.tensor([density(float(m), t, epsilon) for m in middles]) * edges.diff() * len(sent)
    counts = torch.histogram(sent, edges).hist
    assert counts.sum() == len(sent)
    assert stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-4


@given(epsilon=st.floats(1e-3, 30), t=st.floats(-2, 2), other=st.floats(-2, 2), place=st.floats(-0.999, 0.999))
def test_the_likelihood_ratio_of_any_two_inputs_is_bounded(epsilon, t, other, place):
    y = place * pieces(0, epsilon)[0]
    assert 0 < density(y, t, epsilon) <= math.exp(epsilon) * density(y, other, epsilon) * (1 + 1e-9)


@pytest.mark.parametrize("value", [5.0, -1e6])
def test_values_beyond_the_bound_are_those_at_the_bound(value):
    defense = PM(epsilon=0.7, bound=0.5)
    assert torch.equal(draws(defense, value, 1000), draws(defense, math.copysign(0.5, value), 1000))


@given(
    epsilon=st.floats(1e-3, 50),
    bound=st.floats(1e-6, 1e6),
    value=st.floats(-1e6, 1e6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_support_at_any_budget_and_value(epsilon, bound, value, dtype):
    sent = draws(PM(epsilon=epsilon, bound=bound), value, 100, dtype)
    assert sent.dtype == dtype
    assert sent.isfinite().all()
    assert sent.double().abs().max() <= bound / math.tanh(epsilon / 4) * (1 + 1e-6)


def test_a_large_budget_leaves_values_as_they_are():
    update = Tree({"w": torch.linspace(-1, 1, 101, dtype=torch.float64)[None]})
    sent = PM(epsilon=50).protect(update, make_call(clients=1))
    torch.testing.assert_close(sent["w"], update["w"], atol=1e-9, rtol=0)


def test_the_guarantee():
    promise = PM(epsilon=2).guarantee(EXPOSURE)
    assert promise.sentence.endswith("ε = 2 per entry and round; any two values of one entry are covered.")
    assert promise.mechanism == PureLDP(2, coordinates=1000)


def test_gradients_are_refused_in_one_line():
    with pytest.raises(FedveilError, match=r"pm protects weights .*gradient: use the protocol fedavg"):
        fv.federate(fv.task("digits", model="mlp", clients=2, limit=40), PM(), fv.FederationSettings(rounds=1))


def test_measures():
    said = PM(epsilon=0.3, bound=0.5).measures(Tree({"w": torch.ones(1, 3)}))
    assert said["range factor C"] == pytest.approx(pieces(0, 0.3)[0])
    assert said["predicted standard deviation of an entry"] == pytest.approx(PM(epsilon=0.3).base_variance ** 0.5 / 2)


@pytest.mark.parametrize("upload", ["weights", "delta"])
def test_a_round_on_digits(upload):
    task = fv.task("digits", model="mlp", clients=4, limit=200)
    plan = fv.FederationSettings(protocol="fedavg", rounds=1, batch_size=16, upload=upload)
    plain, noisy, weak = (fv.federate(task, d, plan) for d in (None, "pm", "pm:epsilon=50"))
    assert all(torch.isfinite(p).all() for p in noisy.params.values())
    for name in plain.params:
        torch.testing.assert_close(weak.params[name], plain.params[name], atol=1e-6, rtol=0)


# ---- an attacker who knows it ----------------------------------------------------------------------------------


def weighted_cosine(left, right, weight):
    return float((weight * left * right).sum() / ((weight * left**2).sum() * (weight * right**2).sum()).sqrt())


@pytest.mark.parametrize("kind", ["delta", "weights"])
@pytest.mark.parametrize("epsilon, least, margin", [(6.0, 0.7, 0.4), (10.0, 0.9, 0.4), (40.0, 0.999, 0.0)])
def test_knowledge_finds_the_entries_that_tell_something(kind, epsilon, least, margin):
    generator = torch.Generator().manual_seed(0)
    change = 0.02 * torch.randn(1, 20_000, generator=generator)
    start = 0.3 * torch.randn(1, 20_000, generator=generator).clamp(-2, 2)
    facts = Facts(kind=kind, lr=0.05, before=Tree({"w": start}) if kind == "weights" else None)
    base = start if kind == "weights" else torch.zeros_like(start)
    sent = PM(epsilon=epsilon).protect(Tree({"w": base + change}), make_call(clients=1))["w"]
    observed = (base - sent) / facts.step_scale
    known = PM(epsilon=epsilon).knowledge(Tree({"w": observed}), facts)
    true = -change / facts.step_scale
    found = weighted_cosine(known.target["w"], true, known.weight["w"])
    assert found > least
    assert found >= weighted_cosine(observed, true, torch.ones(())) + margin


def test_the_expected_entry_is_that_of_bayes():
    """Against the sum over a grid, for a prior of one spread."""
    epsilon, spread = 2.0, 0.1
    grid = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    for sent in (0.0, 0.6, 0.9, 1.4):
        chance = torch.tensor([1.0]) * torch.exp(-((grid / spread) ** 2) / 2)
        x = math.exp(-epsilon / 2)
        inside = ((1 - x) * sent - grid).abs() <= x
        posterior = chance * torch.where(inside, 1.0, math.exp(-epsilon))
        mean = float((posterior * grid).sum() / posterior.sum())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedveil.defenses.piecewise.SPREADS", torch.tensor([spread], dtype=torch.float64))
            found, _ = likely_entry(torch.tensor([sent]), torch.zeros(1), epsilon)
        assert found.item() == pytest.approx(mean, abs=1e-4)
