"""DP-SGD: every example clipped, noise on the sum, Poisson batches; against a plain loop in double precision."""

import dataclasses
import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

import fedveil as fv
from federation.small import small_task
from fedveil.clients.engine import Engine
from fedveil.defenses.chain import Chain
from fedveil.defenses.dp_sgd import DPSGD
from fedveil.defenses.guarantee import Exposure, GaussianRelease
from fedveil.errors import FedveilError
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.streams import Streams
from fedveil.tree import Tree

from .laws import equal, make_batch, small_model


def plain_step(batch, defense, planned):
    """The step of each client with autograd, one example after another."""
    model = small_model()
    noise = batch.streams
    rows = []
    for k in range(batch.count):
        weights = {name: tensor[k].clone().requires_grad_() for name, tensor in batch.params.items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for x, y in zip(batch.inputs[k], batch.targets[k], strict=True):
            loss = F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])
            found = torch.autograd.grad(loss, list(weights.values()))
            length = torch.sqrt(sum((g**2).sum() for g in found))
            for name, g in zip(weights, found, strict=True):
                total[name] += g * min(1.0, defense.clip / float(length))
        rows.append(total)
    stacked = Tree.stack(rows)
    noisy = stacked.map(lambda g: g + defense.noise_multiplier * defense.clip * noise.normal_like(g))
    return noisy.map(lambda g: g / torch.tensor(planned, dtype=g.dtype).reshape(-1, *[1] * (g.dim() - 1)))


@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize("clip", [0.05, 0.6, 100.0])
def test_a_step_is_that_of_a_plain_loop(clip, backend):
    defense = DPSGD(clip=clip, noise_multiplier=0.3)
    batch = make_batch(dtype=torch.float64)
    batch.engine = Engine(batch.engine.model, F.cross_entropy, backend=backend)
    batch.planned = torch.tensor([6, 7, 3, 10])
    shared = defense.gradient(batch)
    expected = plain_step(make_batch(dtype=torch.float64), defense, [6, 7, 3, 10])
    torch.testing.assert_close(dict(shared.update), dict(expected), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(shared.loss, make_batch(dtype=torch.float64).loss())
    assert shared.seen is batch.inputs


def test_without_clipping_and_noise_it_is_the_mean_gradient():
    shared = DPSGD(clip=1e6, noise_multiplier=1e-30).gradient(make_batch(dtype=torch.float64))
    expected = make_batch(dtype=torch.float64).gradient()
    torch.testing.assert_close(dict(shared.update), dict(expected), rtol=1e-9, atol=1e-12)


def test_one_example_moves_the_sum_by_at_most_the_bound():
    defense = DPSGD(clip=0.2, noise_multiplier=0.5)
    with_it, without = make_batch(), make_batch()
    without = dataclasses.replace(without, inputs=without.inputs[:, :-1], targets=without.targets[:, :-1])
    for batch in (with_it, without):
        batch.planned = torch.ones(4)
    apart = (defense.gradient(with_it).update - defense.gradient(without).update).norm()
    assert (apart <= 0.2 + 1e-5).all()
    assert (apart > 0.19).all()


def test_an_empty_batch_is_answered_by_noise_alone():
    batch = make_batch(clients=2)
    empty = dataclasses.replace(batch, inputs=batch.inputs[:, :0], targets=batch.targets[:, :0])
    empty.planned = torch.tensor([4, 8])
    wide = {"w": torch.zeros(2, 5000)}
    empty.params = Tree(wide)
    shared = DPSGD(clip=0.5, noise_multiplier=2.0).gradient(empty)
    for row, planned in zip(shared.update["w"].numpy(), (4, 8), strict=True):
        assert stats.kstest(row, stats.norm(scale=1.0 / planned).cdf).pvalue > 1e-4
    assert shared.loss.tolist() == [0.0, 0.0]


def test_batch_norm_is_refused_in_one_clear_line():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    guard = fv.Guard(model, F.cross_entropy, "dp-sgd", seed=0, batch_size=6)
    with pytest.raises(FedveilError, match=r"per-example gradients do not exist under batch norm.*resnet18:norm=group"):
        guard.backward(torch.randn(6, 5), torch.arange(6) % 3)


# ---- Poisson batches --------------------------------------------------------------------------------------


def test_every_example_joins_by_a_coin_of_its_own():
    labels = torch.zeros(60)
    joined = torch.zeros(4000, 60)
    for step in range(4000):
        joined[step, DPSGD().sample(labels, 9, Streams.seeded(0, [0], "step", step))] = 1
    # Binomial sizes (chance 9/60), every example alike, and no two examples tied.
    observed = torch.bincount(joined.sum(1).int().long(), minlength=61)[3:17]
    expected = 4000 * torch.tensor(stats.binom(60, 0.15).pmf(range(3, 17)))
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4
    share = joined.mean(0)
    assert (share - 0.15).abs().max() < 4.5 * (0.15 * 0.85 / 4000) ** 0.5
    assert (torch.corrcoef(joined.T) - torch.eye(60)).abs().max() < 5.5 / 4000**0.5


def test_a_client_with_fewer_examples_than_a_batch_sends_them_all():
    assert DPSGD().sample(torch.zeros(3), 3, Streams.seeded(0, [0])).tolist() == [0, 1, 2]
    assert DPSGD().sample(torch.zeros(3), 8, Streams.seeded(0, [0])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_a_federation_divides_by_the_planned_size_and_shares_empty_batches_too(protocol, monkeypatch):
    sizes, planned = [], []
    plain = DPSGD.gradient

    def noted(self, batch):
        if batch.planned is not None:  # not the dry step before training
            sizes.extend([batch.targets.shape[1]] * batch.count)
            planned.extend(batch.planned.tolist())
        return plain(self, batch)

    monkeypatch.setattr(DPSGD, "gradient", noted)
    task = small_task(norm=False)  # 13, 8, 3 and 21 examples
    settings = FederationSettings(protocol=protocol, rounds=12, batch_size=2, lr=0.05)
    run = federate(task, "dp-sgd:noise_multiplier=0.5", settings, backend="stacked")
    steps = 12 * (7 + 4 + 2 + 11)
    assert len(sizes) == steps  # an empty batch is a step as any other
    assert sizes.count(0) > 10
    assert set(planned) == {2}  # the last step of an epoch, too: its own size would tell how many examples there are
    # Each step's size is a sum of coins; together they have mean Σ planned and at most that variance.
    assert abs(sum(sizes) - sum(planned)) < 4.5 * sum(planned) ** 0.5
    assert all(torch.isfinite(tensor).all() for tensor in run.params.values())
    assert all(math.isfinite(record.train_loss) for record in run.history)


def test_a_federation_is_the_same_however_it_is_chunked():
    task, settings = small_task(norm=False), FederationSettings(rounds=2, batch_size=4)
    one, other = (federate(task, "dp-sgd", settings, backend=backend, seed=3) for backend in ("loop", "stacked"))
    for name, tensor in one.params.items():
        torch.testing.assert_close(tensor, other.params[name], rtol=1e-4, atol=1e-5)


# ---- what is promised and known ---------------------------------------------------------------------------


def test_the_ledger_is_told():
    exposure = Exposure(parameters=9, rounds=10, steps_per_round=3, sampling_rate=0.5, example_rate=0.1, local_steps=4)
    promise = DPSGD(noise_multiplier=1.1).guarantee(exposure)
    assert promise.mechanism == GaussianRelease(1.1, 120, 0.1)  # by examples; the server knows who takes part
    assert promise.protects == "one training example"


def test_measures_are_those_of_a_single_example():
    batch = make_batch(clients=4, size=1)
    truth = batch.gradient()
    defense = DPSGD(noise_multiplier=0.2, clip=0.5)
    found = defense.measures(truth)["predicted cosine to the true gradient (batch of 1)"]
    cosines = []
    for seed in range(60):
        shared = defense.gradient(make_batch(clients=4, size=1, seed=seed)).update
        cosines.append(truth.dot(shared) / (truth.norm() * shared.norm()))
    assert found == pytest.approx(float(torch.stack(cosines).mean()), abs=0.05)


def test_chained_defenses_get_its_update():
    chain = Chain.of("dp-sgd+clip:norm=1e-3")
    shared = chain.step(make_batch(), chain.new_states())
    assert (shared.update.norm() < 1.001e-3).all()
    alone = DPSGD().gradient(make_batch().at(0, {})).update
    scaled = alone * (1e-3 / alone.norm())
    torch.testing.assert_close(dict(shared.update), dict(scaled))
    assert not equal(shared.update, alone)
