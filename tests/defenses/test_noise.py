"""Additive noise: the right distribution on every entry, and what an attacker who knows its level makes of it."""

import pytest
import torch
from scipy import stats

from fedveil.defenses.base import Facts
from fedveil.defenses.noise import GaussianNoise, LaplaceNoise
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
def test_one_update_with_equal_noise_is_matched_as_it_is(defense, law):
    """With equal noise on all entries that is the maximum-likelihood estimate: shrinking layers would lose."""
    seen = defense.protect(make_batch(clients=2).gradient(), make_batch(clients=2))
    known = defense.knowledge(seen, Facts())
    assert known.target is seen
    assert all((weight == 1).all() for weight in known.weight.values())
