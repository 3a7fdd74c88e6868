"""Central differential privacy: the mean that a trusted server takes, and what it does not hide."""

import pytest
import torch
from scipy import stats

from fedveil.defenses.base import Facts
from fedveil.defenses.cdp import CDP
from fedveil.defenses.chain import Chain
from fedveil.defenses.clip import clipped
from fedveil.defenses.guarantee import Exposure, GaussianRelease
from fedveil.streams import Streams
from fedveil.tree import Tree

from .laws import EXPOSURE, equal, make_batch

UNIFORM, BY_SIZE = torch.ones(5, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0, 10.0, 600.0], dtype=torch.float64)


def updates(clients=5, entries=10_000):
    generator = torch.Generator().manual_seed(0)
    return Tree({"w": torch.randn(clients, entries, generator=generator) * torch.logspace(-4, 1, clients)[:, None]})


@pytest.mark.parametrize("weights", [UNIFORM, BY_SIZE], ids=["uniform", "by size"])
def test_the_mean_is_that_of_the_clipped_updates_with_noise_on_their_sum(weights):
    defense, given = CDP(noise_multiplier=2.0, clip=0.5), updates()
    streams = Streams.seeded(0, range(5), "server")
    mean = defense.aggregate(given, weights, streams).mean(weights)["w"]
    noise = mean - clipped(given, 0.5).mean()["w"]
    assert stats.kstest(noise.numpy(), stats.norm(scale=2.0 * 0.5 / 5).cdf).pvalue > 1e-4


@pytest.mark.parametrize("weights", [UNIFORM, BY_SIZE], ids=["uniform", "by size"])
def test_one_client_moves_the_sum_by_at_most_twice_the_bound(weights):
    defense, given = CDP(noise_multiplier=1e-9, clip=0.5), updates()
    for client in range(5):
        other = given.map(torch.clone)
        other["w"][client] = -1e3 * given["w"][client]
        one, two = (
            defense.aggregate(tree, weights, Streams.seeded(0, range(5))).mean(weights)["w"] for tree in (given, other)
        )
        assert float(5 * (one - two).norm()) <= 1.0 + 1e-4


def test_every_entry_and_round_has_noise_of_its_own():
    defense = CDP()
    zero = updates() * 0.0
    first, second = (defense.aggregate(zero, UNIFORM, Streams.seeded(0, range(5), r)).mean()["w"] for r in (1, 2))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.05


def test_the_server_sees_every_update_as_it_is():
    chain = Chain.of("cdp:noise_multiplier=100")
    sent = chain.upload(chain.step(make_batch(), [{}]).update, make_batch(), [{}])
    assert equal(sent, make_batch().gradient())
    assert equal(chain.knowledge(sent, Facts()).target, sent)
    assert "honest-but-curious server sees every update" in CDP.weaknesses[0]
    assert "the server, and who listens in on it, see every update" in CDP().guarantee(EXPOSURE).caveat


def test_the_ledger_is_told_of_the_draw_of_clients_where_it_is_anew_each_time():
    once = Exposure(parameters=9, rounds=30, steps_per_round=1, sampling_rate=0.1, local_steps=5)
    assert CDP(noise_multiplier=3.0).guarantee(once).mechanism == GaussianRelease(1.5, 30, 0.1, "fixed")
    often = Exposure(parameters=9, rounds=30, steps_per_round=4, sampling_rate=0.1)
    assert CDP(noise_multiplier=3.0).guarantee(often).mechanism == GaussianRelease(1.5, 120, 1.0, "fixed")


def test_measures_the_noise_against_one_clients_part():
    given = updates(clients=1) * 1e6
    measured = CDP(noise_multiplier=2.0, clip=0.5).measures(given)
    # Norms for bounds may be a hair too long.
    assert measured["noise on the sum to one client's part"] == pytest.approx(2.0 * 100, rel=1e-5)
