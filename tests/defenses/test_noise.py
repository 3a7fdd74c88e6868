"""Additive noise: the right distribution on every entry, and what an attacker who knows its level makes of it."""

import logging

import pytest
import torch
from scipy import stats

from fedveil.defenses.base import Facts
from fedveil.defenses.cdp import CDP
from fedveil.defenses.noise import GaussianNoise, LaplaceNoise, _warn_once
from fedveil.defenses.noise_add import NoiseAdd
from fedveil.errors import FedveilError
from fedveil.registry import defenses
from fedveil.tree import Tree

from .laws import EXPOSURE, apply, call_of, make_batch, make_call

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
        noise = (defense.protect(update, call_of(batch)) - update)["w"]
        for client in noise.flatten(1).numpy():
            assert stats.kstest(client, law.cdf).pvalue > 1e-4


@BOTH
def test_variance_is_the_closed_form(defense, law):
    noise = defense.protect(wide(), make_call(clients=2))["w"]
    assert defense.variance == pytest.approx(law.var())
    assert noise.var() == pytest.approx(law.var(), rel=0.03)
    assert abs(noise.mean()) < 4.5 * law.std() / noise.numel() ** 0.5


@BOTH
def test_clients_tensors_and_steps_draw_their_own_noise(defense, law):
    batch = make_batch(clients=2)
    update = Tree({"a": torch.zeros(2, 2_000), "b": torch.zeros(2, 2_000)})
    first = defense.protect(update, call_of(batch))
    second = defense.protect(update, call_of(batch))  # the stream has moved on
    draws = torch.stack([first["a"][0], first["a"][1], first["b"][0], second["a"][0]])
    correlation = torch.corrcoef(draws) - torch.eye(4)
    assert correlation.abs().max() < 4.5 / 2_000**0.5


@BOTH
def test_predicted_cosine_is_the_measured_one(defense, law):
    generator = torch.Generator().manual_seed(0)
    update = Tree({"w": torch.randn(2, 20_000, generator=generator) * torch.tensor([[0.1], [1.0]])})
    noisy = defense.protect(update, make_call(clients=2))
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
    seen = defense.protect(make_batch(clients=2).gradient(), make_call(clients=2))
    known = defense.knowledge(seen, Facts())
    assert known.target is seen
    assert all((weight == 1).all() for weight in known.weight.values())


# ---- half precision, and numbers beyond it ---------------------------------------------------------------------


HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@HALF
@pytest.mark.parametrize("spec", ["gaussian-noise:sigma=0.003", "laplace-noise:scale=0.003", "cdp"])
def test_noise_on_half_precision_is_drawn_and_added_in_float32(spec, dtype):
    update = wide(value=0.3).map(lambda tensor: tensor.to(dtype))
    single = update.map(torch.Tensor.float)

    def protect(tree):
        if spec == "cdp":
            streams = make_batch(clients=2).streams
            return CDP(clip=0.5, noise_multiplier=0.1).aggregate(tree, torch.ones(2), streams)
        return defenses.parse(spec).protect(tree, make_call(clients=2))

    if spec != "cdp":
        for name, tensor in protect(update).items():
            assert torch.equal(tensor, protect(single)[name].to(dtype))
    # Rounding cuts at most half a step of the type from what float32 has.
    gap = (protect(update).flat().float() - protect(single).flat()).abs()
    assert gap.max() <= 1.5 * torch.finfo(dtype).eps


@HALF
def test_noise_that_rounding_swallows_is_told_once(dtype, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("fedveil"), "propagate", True)
    _warn_once.cache_clear()
    ones = wide(value=1.0).map(lambda tensor: tensor.to(dtype))
    for _ in range(3):
        GaussianNoise(sigma=1e-4).protect(ones, make_call(clients=2))
    (told,) = caplog.messages
    assert "noise of scale 0.0001 is lost in " + str(dtype).removeprefix("torch.") in told
    caplog.clear()
    GaussianNoise(sigma=0.1).protect(ones, make_call(clients=2))
    GaussianNoise(sigma=1e-4).protect(wide(value=1.0), make_call(clients=2))  # float32 holds it
    GaussianNoise(sigma=0).protect(ones, make_call(clients=2))
    GaussianNoise(sigma=1e-4).protect(ones * 1e-3, make_call(clients=2))  # small entries have small steps
    assert not caplog.messages
    NoiseAdd(ratio=1e-5).protect(ones, make_call(clients=2))
    assert "noise of 1e-05 times each layer's spread is lost" in caplog.messages[0]


@pytest.mark.parametrize("spec", ["gaussian-noise:sigma=1e39", "laplace-noise:scale=1e300", "clip:norm=1e39"])
def test_a_field_that_float32_cannot_hold_is_refused(spec):
    with pytest.raises(FedveilError, match=r"must be less than or equal to 3\.4e\+38"):
        defenses.parse(spec)


@pytest.mark.parametrize(
    "spec", ["dp-gaussian:clip=3e38", "dp-laplace:clip=3e38,epsilon=0.1", "dp-sgd:clip=3e38,noise_multiplier=9"]
)
def test_noise_that_float32_cannot_hold_is_refused_in_one_line(spec):
    with pytest.raises(FedveilError, match=r"3\.4e\+38"):
        apply(spec, make_batch())
