"""Noise-Add: noise of each layer's own size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F

from fedveil.defenses.base import Facts
from fedveil.defenses.noise_add import NoiseAdd
from fedveil.errors import FedveilError
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.guard.guard import Guard
from fedveil.tasks.task import task
from fedveil.tree import Tree

from .laws import make_call


def layers(clients=2):
    generator = torch.Generator().manual_seed(0)
    return Tree(
        {
            "small": 1e-4 * torch.randn(clients, 20_000, generator=generator),
            "large": 50 * torch.randn(clients, 100, 200, generator=generator),
            "zero": torch.zeros(clients, 10),
        }
    )


def protect(defense, update, seed=0):
    return defense.protect(update, make_call(clients=update.count, seed=seed))


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
def test_noise_is_normal_with_each_layers_own_spread(ratio):
    update = layers()
    noise = protect(NoiseAdd(ratio=ratio), update) - update
    for name in ("small", "large"):
        for k in (0, 1):
            spread = float(update[name][k].square().mean().sqrt())
            drawn = noise[name][k].flatten()
            assert stats.kstest(drawn.numpy(), stats.norm(scale=ratio * spread).cdf).pvalue > 1e-4
    assert not noise["zero"].any()


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
def test_predicted_cosine_is_the_measured_one(ratio):
    update, defense = layers(), NoiseAdd(ratio=ratio)
    shared = protect(defense, update)
    measured = float((shared.dot(update) / (shared.norm() * update.norm())).mean())
    assert defense.measures(update)["predicted cosine to the true message"] == pytest.approx(measured, abs=0.015)


@pytest.mark.parametrize("kind", ["gradient", "delta"])
@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_layers_are_trusted_by_the_inverse_variance_of_their_noise(ratio, kind):
    update, defense = layers(), NoiseAdd(ratio=ratio)
    shared = protect(defense, update)
    known = defense.knowledge(shared, Facts(kind=kind))
    assert torch.equal(known.target["large"], shared["large"])
    assert (known.weight["small"] == 1).all()
    assert float(known.weight["large"].mean()) == pytest.approx((1e-4 / 50) ** 2, rel=0.1)
    assert (known.weight["zero"] == 1).all()


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_that_trust_finds_inputs_better_than_equal_trust(ratio):
    """The attack in closed form: an update that is linear in the inputs, solved by weighted least squares."""
    generator = torch.Generator().manual_seed(0)
    maps = {"small": torch.randn(300, 20, generator=generator), "large": 100 * torch.randn(40, 20, generator=generator)}
    inputs = torch.randn(30, 20, generator=generator)
    update = Tree({name: inputs @ matrix.T for name, matrix in maps.items()})
    shared = protect(NoiseAdd(ratio=ratio), update)
    weight = NoiseAdd(ratio=ratio).knowledge(shared, Facts()).weight
    errors = []
    for trust in (shared.map(torch.ones_like), weight):
        rows = torch.cat(list(maps.values()))
        root = trust.flat().sqrt()
        solved = torch.linalg.lstsq(root[..., None] * rows, root * shared.flat()).solution
        errors.append(float((solved - inputs).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def test_noise_on_whole_weights_is_known_from_those_that_were_sent():
    before, lr = layers(), 0.1
    change = before.map(lambda t: torch.ones_like(t) * 1e-3)
    shared = (before - protect(NoiseAdd(), before - change)) / lr
    known = NoiseAdd().knowledge(shared, Facts(kind="weights", lr=lr, before=before))
    assert torch.equal(known.target["large"], shared["large"])
    assert (known.weight["small"] == 1).all()
    assert float(known.weight["large"].mean()) == pytest.approx((1e-4 / 50) ** 2, rel=0.1)
    unknown = NoiseAdd().knowledge(shared, Facts(kind="weights", lr=lr))
    assert (unknown.weight["large"] == 1).all()


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20),
    ratio=st.floats(0, 10),
    factor=st.sampled_from([0.25, 2.0, 1024.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_noise_scales_with_the_update(values, ratio, factor, dtype):
    update = Tree({"w": torch.tensor([values], dtype=dtype)})
    shared = protect(NoiseAdd(ratio=ratio), update)["w"]
    assert shared.dtype == dtype
    torch.testing.assert_close(protect(NoiseAdd(ratio=ratio), update * factor)["w"], shared * factor)


def test_a_negative_ratio_is_refused():
    with pytest.raises(FedveilError, match="ratio must be greater than or equal to 0"):
        NoiseAdd(ratio=-1)


@pytest.mark.parametrize(
    "fields", [{"protocol": "fedsgd"}, {"protocol": "fedavg"}, {"protocol": "fedavg", "upload": "delta"}]
)
def test_a_round_of_a_federation(fields):
    digits = task("digits", model="mlp:hidden=[16]", clients=3, limit=60)
    given = FederationSettings(rounds=1, **fields)
    run = federate(digits, NoiseAdd(), given, backend="loop")
    plain = federate(digits, None, given, backend="loop")
    moved = sum(float((run.params[n] - plain.params[n]).square().sum()) for n in plain.params) ** 0.5
    assert 0 < moved < 3


def test_uploads_in_anyones_own_loop():
    model = nn.Linear(50, 40)
    guard = Guard(model, F.cross_entropy, NoiseAdd(ratio=0.5), seed=0)
    noise = guard.upload()["weight"] - model.weight.detach()
    spread = float(model.weight.detach().square().mean().sqrt())
    assert float(noise.std()) == pytest.approx(0.5 * spread, rel=0.1)
