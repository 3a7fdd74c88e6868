"""LDPM: batches of a random mix of classes, clipping and noise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F

from fedveil.defenses.base import Facts
from fedveil.defenses.ldpm import LDPM
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.guard.guard import Guard
from fedveil.streams import Streams
from fedveil.tasks.task import task
from fedveil.tree import Tree

from .laws import EXPOSURE, make_call


def sampled(labels, size, seed=0):
    return LDPM().sample(labels, size, Streams.seeded(seed, [0], "batch"))


def protect(defense, update, seed=0):
    return defense.protect(update, make_call(clients=update.count, seed=seed))


def gradient(clients=2, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return Tree(
        {
            "w": scale * torch.randn(clients, 100, 100, generator=generator),
            "b": 10 * scale * torch.randn(clients, 1_000, generator=generator),
        }
    )


# ---- the mix of classes -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(labels=st.lists(st.integers(-3, 6), min_size=1, max_size=40), data=st.data())
def test_a_batch_has_its_size_and_no_example_twice(labels, data):
    size = data.draw(st.integers(1, len(labels)))
    chosen = sampled(torch.tensor(labels), size, data.draw(st.integers(0, 9)))
    assert chosen.shape == (size,)
    assert len(chosen.unique()) == size
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < len(labels)


def test_the_mix_does_not_follow_the_clients_own():
    labels = torch.cat([torch.zeros(4_000), torch.ones(500), torch.full((500,), 2)]).long()
    shares = torch.stack([torch.bincount(labels[sampled(labels, 100, s)], minlength=3) for s in range(600)]) / 100
    # All shares are 1/3 on average, though 8 of 10 examples have the label 0, and each is that of a flat Dirichlet.
    assert torch.allclose(shares.mean(0), torch.full((3,), 1 / 3), atol=0.05)
    for share in shares.T:
        # The noise of 100 examples blurs the shares, hence a broad margin.
        assert stats.kstest(share.numpy(), stats.beta(1, 2).cdf).statistic < 0.1


def test_examples_of_a_class_are_equally_likely():
    labels = torch.arange(40) % 2
    counts = sum(torch.bincount(sampled(labels, 8, s), minlength=40) for s in range(2_000))
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_what_has_no_classes_is_left_to_the_protocol():
    assert sampled(torch.rand(10), 4) is None
    assert sampled(torch.zeros(10, 3, dtype=torch.int64), 4) is None


# ---- clipping and noise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [5e-4, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipped_then_noisy(sigma, dtype):
    update = gradient().to(dtype)
    noise = protect(LDPM(sigma=sigma, clip=2.0), update) - update * (2.0 / update.norm())
    assert noise["w"].dtype == dtype
    assert stats.kstest(noise["w"].flatten().numpy(), stats.norm(scale=sigma).cdf).pvalue > 1e-4


def test_a_short_gradient_is_not_clipped():
    update = gradient(scale=1e-6)
    assert torch.equal(protect(LDPM(sigma=0.0), update)["w"], update["w"])


@pytest.mark.parametrize("sigma", [1e-3, 1e-2, 0.1])
def test_predicted_cosine_is_the_measured_one(sigma):
    update, defense = gradient(), LDPM(sigma=sigma)
    shared = [protect(defense, update, seed) for seed in range(4)]
    measured = torch.stack([s.dot(update) / (s.norm() * update.norm()) for s in shared]).mean()
    said = defense.measures(update)
    assert said["predicted cosine to the true gradient"] == pytest.approx(float(measured), abs=0.01)
    assert said["share of gradients clipped"] == 1


def test_an_attacker_takes_the_gradient_as_it_came():
    """Equal noise on all entries: shrinking or weighing the layers would only move the best match off the truth."""
    update, defense = gradient(), LDPM(sigma=0.02)
    shared = protect(defense, update)
    known = defense.knowledge(shared, Facts())
    assert known.target is shared
    assert all((weight == 1).all() for weight in known.weight.values())


def test_no_guarantee_is_claimed():
    assert not LDPM().guarantee(EXPOSURE).formal


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_a_round_of_a_federation(protocol):
    digits = task("digits", model="mlp:hidden=[16]", clients=3, limit=60)
    run = federate(digits, LDPM(), FederationSettings(protocol=protocol, rounds=1), backend="loop")
    assert all(torch.isfinite(tensor).all() for tensor in run.params.values())
    assert any(not torch.equal(run.params[n], p) for n, p in digits.model.named_parameters())


def test_a_federation_asks_it_for_its_batches():
    """The mean gradient of equal batches differs from that of the protocol's own, with neither clip nor noise."""
    digits = task("digits", model="mlp:hidden=[16]", clients=3, limit=60)
    given = FederationSettings(rounds=1)
    own = federate(digits, LDPM(sigma=0.0, clip=1e6), given, backend="loop").params
    plain = federate(digits, None, given, backend="loop").params
    assert any(not torch.allclose(own[name], plain[name]) for name in plain)


def test_in_anyones_own_loop():
    model = nn.Linear(50, 40)
    Guard(model, F.cross_entropy, LDPM(sigma=0.0, clip=0.01), seed=0).backward(torch.randn(4, 50), torch.arange(4))
    norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    assert norm == pytest.approx(0.01, rel=1e-4)
