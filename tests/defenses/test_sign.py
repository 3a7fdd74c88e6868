"""Sign compression: its scales, its closed forms, and flips."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedveil.defenses.base import Facts
from fedveil.defenses.sign import SignCompression
from fedveil.errors import FedveilError
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.guard.guard import Guard
from fedveil.tasks.task import task
from fedveil.tree import Tree

from .laws import make_call


def normal(clients=2, entries=40_000):
    generator = torch.Generator().manual_seed(0)
    return Tree(
        {
            "w": torch.randn(clients, entries, generator=generator),
            "b": 3 * torch.randn(clients, 5_000, generator=generator),
        }
    )


def protect(defense, update, seed=0):
    return defense.protect(update, make_call(clients=update.count, seed=seed))


def cosines(left, right):
    return left.dot(right) / (left.norm() * right.norm())


def test_every_entry_is_its_sign_times_the_mean_magnitude_of_its_tensor():
    update = Tree({"w": torch.tensor([[1.0, -2.0, 0.0, 5.0], [-8.0, 0.0, 0.0, 0.0]]), "b": torch.tensor([3.0, -4.0])})
    shared = protect(SignCompression(), update)
    assert shared["w"].tolist() == [[2, -2, 0, 2], [-2, 0, 0, 0]]
    assert shared["b"].tolist() == [3, -4]


def test_a_fixed_scale():
    update = normal()
    shared = protect(SignCompression(scale=0.01), update)
    assert torch.equal(shared["w"], torch.sign(update["w"]) * 0.01)


def test_the_mean_magnitude_is_the_scale_with_the_least_error():
    update = normal()

    def error(scale):
        return float((protect(SignCompression(scale=scale), update) - update)["w"].square().mean())

    best = float((protect(SignCompression(), update) - update)["w"].square().mean())
    assert all(best < error(scale) for scale in (0.5, 0.7, 0.9, 1.2))


@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("flip", [0.0, 0.1, 0.4])
def test_predicted_cosine_is_the_measured_one(scale, flip):
    update, defense = normal(), SignCompression(scale=scale, flip=flip)
    measured = float(cosines(protect(defense, update), update).mean())
    assert defense.measures(update)["predicted cosine to the true gradient"] == pytest.approx(measured, abs=0.015)


def test_the_cosine_of_a_gaussian_gradient():
    update = Tree({"w": normal()["w"]})
    assert float(cosines(protect(SignCompression(), update), update).mean()) == pytest.approx(
        math.sqrt(2 / math.pi), abs=0.005
    )


@pytest.mark.parametrize("flip", [0.1, 0.4])
def test_the_share_of_turned_signs_is_flip(flip):
    update = normal()
    turned = torch.sign(protect(SignCompression(flip=flip), update)["w"]) != torch.sign(update["w"])
    deviation = (flip * (1 - flip) / turned.numel()) ** 0.5
    assert abs(float(turned.float().mean()) - flip) < 4.5 * deviation


def test_with_flips_the_attackers_estimate_has_less_error():
    update, defense = normal(), SignCompression(flip=0.3)
    shared = protect(defense, update)
    known = defense.knowledge(shared, Facts())
    naive, adaptive = (float((guess - update)["w"].square().mean()) for guess in (shared, known.target))
    # A unit Gaussian has (mean |g|)² = 2/π, and 1 − 2·flip = 0.4 of the signs' covariance is left.
    assert naive == pytest.approx(1 + (1 - 2 * 0.4) * 2 / math.pi, rel=0.02)
    assert adaptive == pytest.approx(1 - 0.4**2 * 2 / math.pi, rel=0.02)


def test_without_flips_signs_are_taken_as_they_are():
    shared = protect(SignCompression(), normal())
    known = SignCompression().knowledge(shared, Facts())
    assert torch.equal(known.target["w"], shared["w"])
    assert (known.weight["w"] == 1).all()


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30),
    factor=st.floats(1e-3, 1e3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_signs_survive_and_scale_follows(values, factor, dtype):
    update = Tree({"w": torch.tensor([values], dtype=dtype)})
    shared = protect(SignCompression(), update)["w"]
    assert shared.dtype == dtype
    if update["w"].abs().mean() > 1e-30:
        assert torch.equal(torch.sign(shared), torch.sign(update["w"]))
    torch.testing.assert_close(protect(SignCompression(), update * factor)["w"], shared * factor)
    assert len(shared.abs().unique()) <= 2  # the scale, and zero


@pytest.mark.parametrize("fields", [{"scale": 0}, {"scale": -1.0}, {"flip": 0.5}, {"flip": -0.1}])
def test_bad_fields_are_refused(fields):
    with pytest.raises(FedveilError, match=next(iter(fields))):
        SignCompression(**fields)


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_a_round_of_a_federation(protocol):
    digits = task("digits", model="mlp:hidden=[16]", clients=3, limit=60)
    run = federate(digits, SignCompression(flip=0.1), FederationSettings(protocol=protocol, rounds=1), backend="loop")
    assert all(torch.isfinite(tensor).all() for tensor in run.params.values())
    assert any(not torch.equal(run.params[n], p) for n, p in digits.model.named_parameters())


def test_in_anyones_own_loop():
    model = nn.Linear(50, 40)
    Guard(model, F.cross_entropy, SignCompression(), seed=0).backward(torch.randn(4, 50), torch.arange(4))
    assert len(model.weight.grad.abs().unique()) == 1
