"""Additive noise: the right distribution on every entry, and what an attacker who knows its level makes of it."""

import pytest
import torch
from scipy import stats

from fedveil.defenses.base import Facts
from fedveil.defenses.noise import GaussianNoise, LaplaceNoise, signal_share
from fedveil.tree import Tree

from .laws import EXPOSURE, make_batch

BOTH = pytest.mark.parametrize(
    "defense, law",
    [
        (GaussianNoise(sigma=0.3), stats.norm(scale=0.3)),
        (LaplaceNoise(scale=0.2), stats.laplace(scale=0.2)),
    ],
    ids=["gaussian", "laplace"],
)


def wide(clients=2, entries=20_000, value=0.0):
    return Tree({"w": torch.full((clients, entries // 100, 100), value), "b": torch.full((clients, 50), value)})


@BOTH
def test_noise_has_the_distribution_it_says(defense, law):
    batch = make_batch(clients=2)
    for value in (0.0, 2.0):
        update = wide(value=value)
        noise = (defense.protect(update, batch) - update)["w"]
        for client in noise.flatten(1).numpy():
            assert stats.kstest(client, law.cdf).pvalue > 1e-4


@BOTH
def test_variance_is_the_closed_form(defense, law):
    noise = defense.protect(wide(), make_batch(clients=2))["w"]
    assert defense.variance == pytest.approx(law.var())
    assert noise.var() == pytest.approx(law.var(), rel=0.03)
    assert abs(noise.mean()) < 4.5 * law.std() / noise.numel() ** 0.5


@BOTH
def test_clients_tensors_and_steps_draw_their_own_noise(defense, law):
    batch = make_batch(clients=2)
    update = Tree({"a": torch.zeros(2, 2_000), "b": torch.zeros(2, 2_000)})
    first = defense.protect(update, batch)
    second = defense.protect(update, batch)  # the stream has moved on
    draws = torch.stack([first["a"][0], first["a"][1], first["b"][0], second["a"][0]])
    correlation = torch.corrcoef(draws) - torch.eye(4)
    assert correlation.abs().max() < 4.5 / 2_000**0.5


@BOTH
def test_predicted_cosine_is_the_measured_one(defense, law):
    generator = torch.Generator().manual_seed(0)
    update = Tree({"w": torch.randn(2, 20_000, generator=generator) * torch.tensor([[0.1], [1.0]])})
    noisy = defense.protect(update, make_batch(clients=2))
    measured = (noisy.dot(update) / (noisy.norm() * update.norm())).mean()
    assert defense.measures(update)["predicted cosine to the true gradient"] == pytest.approx(float(measured), rel=0.01)


@BOTH
def test_no_guarantee_is_claimed_without_clipping(defense, law):
    promise = defense.guarantee(EXPOSURE)
    assert not promise.formal
    assert promise.mechanism is None
    assert "none" in promise.sentence


# ---- what an attacker makes of it -----------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("scale", [0.03, 0.3, 3.0])
def test_knowledge_shrinks_by_the_share_of_signal(defense, law, scale):
    generator = torch.Generator().manual_seed(0)
    update = Tree({"w": scale * torch.randn(2, 50_000, generator=generator)})
    known = defense.knowledge(defense.protect(update, make_batch(clients=2)), Facts())
    share = scale**2 / (scale**2 + law.var())
    assert known.weight["w"].unique().numel() == 2  # one share per client and tensor
    torch.testing.assert_close(known.weight["w"], torch.full((2, 50_000), share), atol=0.02, rtol=0)


@BOTH
def test_knowledge_is_nearer_to_the_truth_than_what_was_seen(defense, law):
    generator = torch.Generator().manual_seed(0)
    update = Tree({"w": 0.2 * torch.randn(2, 20_000, generator=generator)})
    seen = defense.protect(update, make_batch(clients=2))
    known = defense.knowledge(seen, Facts())
    naive, adaptive = (float((tree - update).norm().square().mean()) / 20_000 for tree in (seen, known.target))
    assert naive == pytest.approx(law.var(), rel=0.05)
    assert adaptive == pytest.approx(0.04 * law.var() / (0.04 + law.var()), rel=0.05)  # the least any shrinkage leaves


@BOTH
def test_a_layer_that_drowns_is_left_out_and_a_clear_one_is_trusted(defense, law):
    update = Tree({"drowned": torch.full((1, 5_000), 1e-6), "clear": torch.full((1, 5_000), 100.0)})
    weight = defense.knowledge(defense.protect(update, make_batch(clients=1)), Facts()).weight
    assert weight["drowned"].max() < 0.06
    assert weight["clear"].min() > 0.999


def test_share_of_signal_at_its_edges():
    assert signal_share(torch.zeros(2, 3), 0.1).tolist() == [[0.0], [0.0]]
    assert signal_share(torch.ones(1, 3), 0.0).tolist() == [[1.0]]
    assert torch.isfinite(signal_share(torch.zeros(2, 3), 0.0)).all()
    assert signal_share(torch.full((1, 2, 2), 2.0), 1.0).tolist() == [[[0.75]]]
