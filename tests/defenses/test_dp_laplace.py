"""The calibrated Laplace mechanism: its scale, and the ratio of likelihoods that ε bounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.defenses.clip import clipped
from fedveil.defenses.dp_laplace import DPLaplace
from fedveil.defenses.guarantee import LaplaceRelease
from fedveil.tree import Tree

from .laws import EXPOSURE, make_call


@pytest.mark.parametrize("order, cut, scale", [("l1", 2.0 / 10_000, 0.8), ("l2", 2.0 / 100, 80.0)])
def test_the_update_is_cut_and_the_noise_is_as_calibrated(order, cut, scale):
    defense = DPLaplace(epsilon=5.0, clip=2.0, order=order)  # 2·C/ε, times √d under an L2 clip
    update = Tree({"w": torch.full((2, 10_000), 3.0)})
    shared = defense.protect(update, make_call(clients=2))
    assert defense.variance(10_000) == pytest.approx(2 * scale**2)
    for client in (shared["w"] - cut).numpy():
        assert stats.kstest(client, stats.laplace(scale=scale).cdf).pvalue > 1e-4


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 999),
    epsilon=st.floats(0.01, 20),
    order=st.sampled_from(["l1", "l2"]),
    spread=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_no_output_is_more_than_e_to_the_epsilon_times_as_likely(seed, epsilon, order, spread):
    defense = DPLaplace(epsilon=epsilon, order=order)
    generator = torch.Generator().manual_seed(seed)
    one, other, output = (spread * torch.randn(1, 12, generator=generator, dtype=torch.float64) for _ in range(3))
    one, other = (clipped(Tree({"w": tensor}), defense.clip, order)["w"] for tensor in (one, other))
    scale = defense.scale(12)
    ratio = ((output - other).abs() - (output - one).abs()).sum() / scale
    assert abs(float(ratio)) <= epsilon * (1 + 1e-9)


def test_opposite_corners_reach_epsilon():
    defense = DPLaplace(epsilon=3.0)
    one = torch.zeros(4, dtype=torch.float64)
    one[0] = defense.clip
    assert float((2 * one).abs().sum()) / defense.scale(4) == pytest.approx(3.0)
    corner = torch.full((4,), defense.clip / 2, dtype=torch.float64)  # of L2 length 1
    wide = DPLaplace(epsilon=3.0, order="l2")
    assert float((2 * corner).abs().sum()) / wide.scale(4) == pytest.approx(3.0)


def test_the_ledger_is_told():
    assert DPLaplace(epsilon=2.0, clip=7.0).guarantee(EXPOSURE).mechanism == LaplaceRelease(2.0, 10)


def test_measures_are_the_measured_ones():
    update = Tree({"w": torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0))})
    defense = DPLaplace(epsilon=30_000.0, clip=100.0)
    shared = defense.protect(update, make_call(clients=2))
    cosine = (update.dot(shared) / (update.norm() * shared.norm())).mean()
    assert 0.2 < float(cosine) < 0.9
    assert defense.measures(update)["predicted cosine to the true gradient"] == pytest.approx(float(cosine), rel=0.03)
