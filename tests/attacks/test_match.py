"""Costs against plain NumPy, and what weights, scale and zeros do to them."""

import math

import numpy as np
import pytest
import torch

from fedveil.attacks.match import MATCHES, cosine, l1_l2, l2, layer_cosine

SHAPES = {"a": (4, 3), "b": (5,), "c": (2, 2, 3)}
NAMES = [name for name in MATCHES if name != "l1-l2-by-layer"]  # it counts tensors: see test_text_matching


def trees(seed=0):
    """An update, a target and weights in [0, 1]."""
    draw = np.random.default_rng(seed)
    update, target = ({n: draw.normal(size=s) for n, s in SHAPES.items()} for _ in range(2))
    return update, target, {n: draw.uniform(size=s) for n, s in SHAPES.items()}


def tensors(*parts):
    return [{n: torch.tensor(v) for n, v in part.items()} for part in parts]


def flat(part):
    return np.concatenate([v.ravel() for v in part.values()])


def numpy_cosine(u, t, w):
    return 1 - (w * u * t).sum() / np.sqrt((w * u * u).sum() * (w * t * t).sum())


def numpy_cost(name, update, target, weight):
    u, t, w = flat(update), flat(target), flat(weight)
    if name == "cosine":
        return numpy_cosine(u, t, w)
    if name == "direction":
        return 2 * numpy_cosine(u, t, w)
    if name == "unit-l2":
        return (w * (u / np.linalg.norm(u) - t) ** 2).sum()
    if name == "layer-cosine":
        return np.mean([numpy_cosine(update[n].ravel(), target[n].ravel(), weight[n].ravel()) for n in update])
    if name == "signs":
        return numpy_signs(update, target, weight)
    squares = (w * (u - t) ** 2).sum()
    if name == "relative-l2":
        return squares / (w * t**2).sum()
    return squares if name == "l2" else squares + 0.01 * (w * np.abs(u - t)).sum()


def numpy_signs(update, target, weight):
    """−log of the chance of every sign: (1 − w)/2 that it was turned, and w that it is the update's, as it seems."""
    costs = []
    for n, entries in update.items():
        likely = 1 / (1 + np.exp(-64.0 * np.sign(target[n]) * entries / np.abs(entries).mean()))
        costs.append(-np.log((1 - weight[n]) / 2 + weight[n] * likely).ravel())
    return np.concatenate(costs).mean()


@pytest.mark.parametrize("name", NAMES)
def test_equals_numpy(name):
    update, target, weight = trees()
    found = MATCHES[name](*tensors(update, target, weight))
    assert found.shape == ()
    np.testing.assert_allclose(found.item(), numpy_cost(name, update, target, weight), rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_one_are_no_weights(name):
    update, target, _ = trees(1)
    u, t = flat(update), flat(target)
    ones = {n: np.ones(s) for n, s in SHAPES.items()}
    plain = {
        "l2": ((u - t) ** 2).sum(),
        "relative-l2": ((u - t) ** 2).sum() / (t**2).sum(),
        "l1-l2": ((u - t) ** 2).sum() + 0.01 * np.abs(u - t).sum(),
        "cosine": 1 - u @ t / np.linalg.norm(u) / np.linalg.norm(t),
    }
    expected = plain.get(name, numpy_cost(name, update, target, ones))
    np.testing.assert_allclose(MATCHES[name](*tensors(update, target, ones)).item(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_weight_zero_leaves_a_layer_out(name):
    update, target, weight = trees(2)
    weight["b"] = np.zeros(SHAPES["b"])
    if name == "unit-l2":
        update["b"] = np.zeros(SHAPES["b"])  # the length of an update is that of all its entries
    without = [{n: v for n, v in part.items() if n != "b"} for part in (update, target, weight)]
    full, part = MATCHES[name](*tensors(update, target, weight)), MATCHES[name](*tensors(*without))
    torch.testing.assert_close(full, part)
    target["b"] = 1e3 * target["b"]
    torch.testing.assert_close(MATCHES[name](*tensors(update, target, weight)), part)


@pytest.mark.parametrize("cost", [cosine, layer_cosine, MATCHES["direction"]])
@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e6])
def test_cosines_are_blind_to_scale_also_of_tiny_gradients_in_single_precision(cost, scale):
    update, target, weight = tensors(*trees(3))
    single = [{n: v.float() for n, v in part.items()} for part in (update, target, weight)]
    expected = cost(*single)
    scaled = [{n: scale * v for n, v in part.items()} for part in single[:2]]
    torch.testing.assert_close(cost(scaled[0], single[1], single[2]), expected)
    torch.testing.assert_close(cost(single[0], scaled[1], single[2]), expected)
    torch.testing.assert_close(cost(scaled[0], scaled[1], single[2]), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("zero", ["update", "target", "weight", "all"])
def test_zeros_give_a_finite_value_and_slope(name, zero):
    parts = dict(zip(("update", "target", "weight"), tensors(*trees(4)), strict=True))
    for which, part in parts.items():
        if zero in (which, "all"):
            parts[which] = {n: torch.zeros(SHAPES[n]) for n in part}
        parts[which] = {n: v.float() for n, v in parts[which].items()}
    live = {n: v.requires_grad_() for n, v in parts["update"].items()}
    value = MATCHES[name](live, parts["target"], parts["weight"])
    slopes = torch.autograd.grad(value, list(live.values()))
    assert torch.isfinite(value)
    assert all(torch.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("cost", [l2, cosine, layer_cosine, l1_l2])
def test_a_perfect_match_costs_nothing_and_nothing_costs_less(cost):
    update, target, weight = tensors(*trees(5))
    assert cost(target, target, weight).item() == pytest.approx(0, abs=1e-12)
    assert cost(update, target, weight).item() > 0.1


def test_directions_are_told_apart_where_the_cosine_has_lost_its_digits():
    _, target, weight = tensors(*trees(6))
    single = [{n: v.float() for n, v in part.items()} for part in (target, weight)]
    near = {n: 3 * v * (1 + 1e-5 * (-1) ** place) for place, (n, v) in enumerate(single[0].items())}
    assert 0 < MATCHES["direction"](near, *single).item() < 1e-9


def test_layer_cosine_does_not_count_a_tensor_that_is_only_rounding():
    """Such as the bias of an attention's keys: its direction differs from one evaluation to the next."""
    update, target, weight = trees(3)
    target["b"] *= 1e-9
    turned = {**update, "b": -update["b"]}
    one, other = (MATCHES["layer-cosine"](*tensors(each, target, weight)) for each in (update, turned))
    torch.testing.assert_close(one, other)
    without = [{n: v for n, v in part.items() if n != "b"} for part in (update, target, weight)]
    torch.testing.assert_close(one, MATCHES["layer-cosine"](*tensors(*without)))


def test_signs_are_blind_to_the_size_of_every_tensor_and_to_tensors_that_are_only_rounding():
    update, target, weight = tensors(*trees(7))
    cost = MATCHES["signs"]
    expected = cost(update, target, weight)
    torch.testing.assert_close(cost({**update, "b": 1e-3 * update["b"]}, target, weight), expected)
    torch.testing.assert_close(cost(update, {**target, "b": 5.0 * target["b"]}, weight), expected)
    without = [{n: v for n, v in part.items() if n != "b"} for part in (update, target, weight)]
    torch.testing.assert_close(cost({**update, "b": 1e-9 * update["b"]}, target, weight), cost(*without))


def test_an_entry_that_was_sent_as_zero_is_wrong_with_either_sign():
    cost, one = MATCHES["signs"], {"a": torch.ones(3)}
    sent = {"a": torch.tensor([1.0, 0.0, -1.0])}
    zero, up, down = (cost({"a": torch.tensor([2.0, middle, -2.0])}, sent, one) for middle in (0.0, 1.0, -1.0))
    assert zero < up
    torch.testing.assert_close(up, down)


def test_a_sign_that_may_have_been_turned_costs_no_more_than_that_is_unlikely():
    cost = MATCHES["signs"]
    entries, wrong = {"a": torch.tensor([3.0, 1.0, 1.0, 1.0])}, {"a": torch.tensor([-1.0, 1.0, 1.0, 1.0])}
    found = cost(entries, wrong, {"a": torch.full((4,), 0.6)})
    torch.testing.assert_close(found, torch.tensor([-math.log(0.2)] + 3 * [-math.log(0.8)]).mean())
