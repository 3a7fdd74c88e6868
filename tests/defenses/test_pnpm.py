"""PNPM: unbiased, with the variance that SPM-FL quotes for it; covers signs only, as SPM does."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fedveil as fv
from fedveil.defenses.base import Facts
from fedveil.defenses.guarantee import PureLDP
from fedveil.defenses.pnpm import PNPM
from fedveil.defenses.spm import SPM
from fedveil.tree import Tree

from .laws import EXPOSURE, make_call

BUDGETS = pytest.mark.parametrize("epsilon", [0.3, 1.2, 3.9])


def draws(defense, value, count=400_000, dtype=torch.float64):
    update = Tree({"w": torch.full((1, count), value, dtype=dtype)})
    return defense.protect(update, make_call(clients=1))["w"][0]


def bound(epsilon):
    return (math.exp(epsilon) + 3) / (math.exp(epsilon) - 1)


def density(y, omega, epsilon):
    e, c, size = math.exp(epsilon), bound(epsilon), abs(omega)
    share = e / (e + 1) if y * omega > 0 else 1 / (e + 1)
    return share / ((c - 1) * size) if size <= abs(y) <= c * size else 0.0


@BUDGETS
@pytest.mark.parametrize("value", [0.5, -3.0])
def test_support_mean_and_variance(epsilon, value):
    sent = draws(PNPM(epsilon=epsilon), value)
    factor = (sent / value).abs()
    assert factor.min() >= 1 - 1e-12
    assert factor.max() <= bound(epsilon) + 1e-12
    variance = 4 * (math.exp(epsilon) + 1 / 3) / (math.exp(epsilon) - 1) ** 2
    assert abs(float(sent.mean()) - value) < 4.5 * abs(value) * (variance / len(sent)) ** 0.5
    assert float(sent.var()) == pytest.approx(variance * value**2, rel=0.02)
    assert PNPM(epsilon=epsilon).variance == pytest.approx(variance)
    assert PNPM(epsilon=epsilon).mean == pytest.approx(1)


def test_the_numbers_at_the_papers_budget():
    assert PNPM(epsilon=0.3).variance == pytest.approx(55.0, abs=0.05)
    assert SPM(epsilon=0.3, debias=True).variance < PNPM(epsilon=0.3).variance


@BUDGETS
def test_samples_follow_the_exact_density_and_signs_are_covered(epsilon):
    sent, c = draws(PNPM(epsilon=epsilon), 1.0, 100_000), bound(epsilon)
    size = torch.linspace(1.0, c, 21, dtype=torch.float64)
    edges = torch.cat([-size.flip(0), size])
    middles = [float(m) for m in (edges[1:] + edges[:-1]) / 2]
    expected = torch.tensor([density(m, 1.0, epsilon) for m in middles]) * edges.diff() * len(sent)
    used = expected > 0
    counts = torch.histogram(sent, edges).hist
    assert counts[~used].sum() == 0
    assert stats.chisquare(counts[used], expected[used], sum_check=False).pvalue > 1e-4
    covered = [m for m, use in zip(middles, used, strict=True) if use]
    ratios = [density(m, 1.0, epsilon) / density(m, -1.0, epsilon) for m in covered]
    assert max(ratios) == pytest.approx(math.exp(epsilon))
    assert min(ratios) == pytest.approx(math.exp(-epsilon))


@BUDGETS
def test_sizes_are_not_covered(epsilon):
    """The supports of different sizes differ: the likelihood ratio has no bound."""
    assert density(1.01, 1.0, epsilon) > 0
    assert density(1.01, 1.02, epsilon) == 0
    assert (draws(PNPM(epsilon=epsilon), 1.0).abs() < 1.02).any()
    assert not (draws(PNPM(epsilon=epsilon), 1.02).abs() < 1.02 - 1e-9).any()
    promise = PNPM(epsilon=epsilon).guarantee(EXPOSURE)
    assert "sizes are not covered" in promise.sentence
    assert promise.mechanism == PureLDP(epsilon, coordinates=1000)


@given(epsilon=st.floats(1e-3, 50), value=st.floats(-1e20, 1e20).filter(lambda v: v == 0 or abs(v) > 1e-20))
def test_support_at_any_budget_and_value(epsilon, value):
    value = torch.tensor(value, dtype=torch.float32).item()
    sent = draws(PNPM(epsilon=epsilon), value, 200, torch.float32).double()
    if value == 0:
        assert (sent == 0).all()
        return
    assert (sent / value).abs().min() >= 1 - 1e-5
    assert (sent / value).abs().max() <= (1 + 4 / math.expm1(epsilon)) * (1 + 1e-5)
    assert PNPM(epsilon=epsilon).mean == pytest.approx(1, rel=1e-9)


@BUDGETS
def test_the_informed_estimate_is_closer(epsilon):
    truth = Tree({"w": torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0))})
    truth["w"][:, ::3] = 0
    sent = PNPM(epsilon=epsilon).protect(truth, make_call(clients=2))
    for kind in ("gradient", "delta"):
        known = PNPM(epsilon=epsilon).knowledge(sent, Facts(kind=kind))
        assert (known.target - truth).norm().sum() < (sent - truth).norm().sum()
        assert (known.weight["w"][:, ::3] == 1).all()
        assert known.weight["w"][0, 1] == pytest.approx(math.tanh(epsilon / 2))


def test_a_round_on_digits():
    task = fv.task("digits", model="mlp", clients=4, limit=200)
    plan = fv.FederationSettings(protocol="fedavg", rounds=1, batch_size=16)
    plain, pnpm, weak = (fv.federate(task, d, plan) for d in (None, "pnpm", "pnpm:epsilon=50"))
    assert all(torch.isfinite(p).all() for p in pnpm.params.values())
    assert any(not torch.equal(pnpm.params[n], plain.params[n]) for n in plain.params)
    for name in plain.params:
        torch.testing.assert_close(weak.params[name], plain.params[name])
