"""DP-Clip: a bound on the update, the right noise, and the Gaussian mechanism that the ledger is told of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.defenses.chain import Chain
from fedveil.defenses.clip import clipped
from fedveil.defenses.dp_clip import DPClip
from fedveil.defenses.guarantee import Exposure, GaussianRelease
from fedveil.defenses.noise import GaussianNoise
from fedveil.errors import FedveilError
from fedveil.tree import Tree

from .laws import EXPOSURE, equal, make_batch, make_call


@settings(max_examples=60, deadline=None)
@given(
    bound=st.floats(1e-3, 1e3), scale=st.floats(1e-6, 1e6), seed=st.integers(0, 99), order=st.sampled_from(["l1", "l2"])
)
def test_no_update_is_longer_than_the_bound_and_short_ones_stay(bound, scale, seed, order):
    generator = torch.Generator().manual_seed(seed)
    update = Tree({"w": scale * torch.randn(3, 7, 2, generator=generator), "b": scale * torch.randn(3, 4)})
    update = Tree({**update, "w": update["w"] * torch.tensor([0.01, 1.0, 100.0])[:, None, None]})
    power = 1.0 if order == "l1" else 2.0
    length, cut = update.norm(power), clipped(update, bound, order)
    assert (cut.norm(power) <= bound * (1 + 1e-5)).all()
    torch.testing.assert_close(cut.norm(power), length.clamp_max(bound), rtol=1e-4, atol=0)
    for k in (length <= bound).nonzero().flatten().tolist():
        assert equal(cut.rows([k]), update.rows([k]))
    # The direction is kept.
    cosine = update.dot(cut) / (update.norm() * cut.norm())
    torch.testing.assert_close(cosine, torch.ones(3), rtol=1e-4, atol=1e-4)


def test_it_is_clipping_and_noise_in_a_row():
    update = make_batch().gradient()
    shared = DPClip(clip=0.1, sigma=0.3).protect(update, make_call())
    by_hand = GaussianNoise(sigma=0.3).protect(clipped(update, 0.1), make_call())
    assert equal(shared, by_hand)


def test_noise_has_the_distribution_it_says():
    update = Tree({"w": torch.full((2, 10_000), 3.0)})
    shared = DPClip(clip=2.0, sigma=0.3).protect(update, make_call(clients=2))
    for client in (shared["w"] - 2.0 / 100).numpy():
        assert stats.kstest(client, stats.norm(scale=0.3).cdf).pvalue > 1e-4


def test_the_ledger_is_told_of_a_sensitivity_of_twice_the_bound():
    promise = DPClip(clip=0.5, sigma=2.0).guarantee(EXPOSURE)
    assert promise.mechanism == GaussianRelease(2.0, 10)
    assert not DPClip(sigma=0).guarantee(EXPOSURE).formal


def test_local_steps_are_releases_of_their_own_unless_it_acts_on_the_upload():
    exposure = Exposure(parameters=9, rounds=5, steps_per_round=1, sampling_rate=1.0, local_steps=12)
    assert DPClip().guarantee(exposure).mechanism.releases == 60
    assert DPClip(at="upload").guarantee(exposure).mechanism.releases == 5


def test_whole_weights_are_refused():
    Chain.of("dp-clip").check_message("weights")  # on the gradients of the local steps it may act
    with pytest.raises(FedveilError, match="dp-clip protects a gradient or a change of weights"):
        Chain.of("dp-clip:at=upload").check_message("weights")


def test_measures_are_the_measured_ones():
    generator = torch.Generator().manual_seed(0)
    update = Tree({"w": torch.randn(2, 20_000, generator=generator) * torch.tensor([[0.001], [1.0]])})
    defense = DPClip(clip=1.0, sigma=0.005)
    shared = defense.protect(update, make_call(clients=2))
    cosine = (update.dot(shared) / (update.norm() * shared.norm())).mean()
    found = defense.measures(update)
    assert found["predicted cosine to the true gradient"] == pytest.approx(float(cosine), rel=0.02)
    signal = clipped(update, 1.0).norm()
    noise = (shared - clipped(update, 1.0)).norm()
    assert found["noise-to-signal ratio"] == pytest.approx(float((noise / signal).mean()), rel=0.02)
