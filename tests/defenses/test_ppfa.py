"""PPFA: the norm of the distortion, its direction, and what it hides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedveil.defenses.base import Facts
from fedveil.defenses.ppfa import PPFA
from fedveil.errors import FedveilError
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.guard.guard import Guard
from fedveil.registry import defenses
from fedveil.tasks.task import task
from fedveil.tree import Tree

from .laws import EXPOSURE, call_of, make_batch, make_call

# epsilon, diameter, c and 4D(1 − c − ε) by hand
NORMS = [
    (0.8, 1.0, 0.0, 0.8),
    (0.995, 10.0, 0.0, 0.2),
    (0.05, 0.5, 0.15, 1.6),
    (0.8, 1.0, 0.2, 0.0),
    (1.0, 5.0, 0.0, 0.0),
]


def distortion(defense, batch, update=None):
    update = batch.params if update is None else update
    return defense.protect(update, call_of(batch)) - update


def cosines(left, right):
    return left.dot(right) / (left.norm() * right.norm())


@pytest.mark.parametrize("at", ["upload", "gradient"])
@pytest.mark.parametrize("direction", ["pgd", "random"])
@pytest.mark.parametrize("epsilon, diameter, c, norm", NORMS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_the_distortion_has_its_norm(epsilon, diameter, c, norm, direction, at, dtype, tolerance):
    defense = PPFA(epsilon=epsilon, diameter=diameter, c=c, direction=direction, at=at)
    batch = make_batch(dtype=dtype)
    made = distortion(defense, batch, batch.gradient())
    assert all(tensor.dtype == dtype for tensor in made.values())
    torch.testing.assert_close(made.norm(), torch.full((4,), norm, dtype=dtype), rtol=tolerance, atol=1e-9)
    assert defense.measures(batch.gradient())["norm of the distortion"] == pytest.approx(norm, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(epsilon=st.floats(0, 1), c=st.floats(0, 2), diameter=st.floats(1e-3, 1e3))
def test_a_negative_norm_is_refused_and_others_are_not(epsilon, c, diameter):
    if epsilon + c > 1 + 1e-6:
        with pytest.raises(FedveilError, match="epsilon must be at most 1 - c") as caught:
            PPFA(epsilon=epsilon, c=c, diameter=diameter)
        assert "\n" not in str(caught.value)
    elif epsilon + c <= 1:
        assert PPFA(epsilon=epsilon, c=c, diameter=diameter).norm >= 0


@settings(max_examples=30, deadline=None)
@given(epsilon=st.floats(0, 0.99), diameter=st.floats(0.01, 10), seed=st.integers(0, 3))
def test_a_smaller_budget_distorts_more(epsilon, diameter, seed):
    batch = make_batch(seed=seed, dtype=torch.float64)
    lengths = [
        distortion(PPFA(epsilon=e, diameter=diameter, direction="random"), batch).norm() for e in (epsilon, epsilon / 2)
    ]
    assert (lengths[1] >= lengths[0] * (1 - 1e-9)).all()


# ---- the direction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_the_search_lowers_the_loss_of_the_distorted_model(steps):
    batch = make_batch()
    losses = {}
    for direction in ("random", "pgd"):
        defense = PPFA(epsilon=0.5, direction=direction, steps=steps)
        losses[direction] = make_batch().loss(params=defense.protect(batch.params, make_call()))
    assert (losses["pgd"] < losses["random"]).all()


def test_more_steps_lower_it_more():
    losses = []
    for steps in (1, 3, 10, 30):
        sent = PPFA(epsilon=0.5, steps=steps, lr=0.05).protect(make_batch().params, make_call())
        losses.append(float(make_batch().loss(params=sent).mean()))
    assert losses == sorted(losses, reverse=True)


def test_a_change_of_weights_gets_the_distortion_of_the_weights():
    batch, before = make_batch(dtype=torch.float64), make_batch(dtype=torch.float64).params.map(lambda t: t + 0.1)
    weights = distortion(PPFA(), make_batch(dtype=torch.float64))
    delta = distortion(PPFA(), make_batch(dtype=torch.float64), batch.params - before)
    torch.testing.assert_close(dict(delta), dict(weights))


def test_a_gradients_distortion_lowers_the_loss_when_the_server_moves_against_it():
    losses = {}
    for direction in ("random", "pgd"):
        batch = make_batch()
        made = distortion(PPFA(at="gradient", epsilon=0.5, direction=direction), batch, batch.gradient())
        losses[direction] = make_batch().loss(params=batch.params - made)
    assert (losses["pgd"] < losses["random"]).all()


def test_the_best_direction_is_that_of_the_gradient():
    """The weakness: the longer the search, the more of the distortion tells the gradient itself."""
    batch = make_batch()
    gradient = batch.gradient()
    found = []
    for steps in (1, 10, 100):
        made = distortion(PPFA(at="gradient", epsilon=0.99, steps=steps), make_batch(), gradient)
        found.append(float(cosines(made, gradient).mean()))
    assert found[0] < found[1] < found[2]
    assert found[2] > 0.95
    plain = distortion(PPFA(at="gradient", epsilon=0.99, direction="random"), make_batch(), gradient)
    assert abs(float(cosines(plain, gradient).mean())) < 0.5


# ---- what an attacker knows -----------------------------------------------------------------------------------


def layers(clients=2):
    generator = torch.Generator().manual_seed(0)
    return Tree(
        {
            "w": 0.001 * torch.randn(clients, 100, 100, generator=generator),
            "b": 0.1 * torch.randn(clients, 1_000, generator=generator),
        }
    )


def test_predicted_cosine_of_a_random_direction_is_the_measured_one():
    update, defense = layers(), PPFA(at="gradient", direction="random", epsilon=0.2)
    measured = float(cosines(defense.protect(update, make_call(clients=2)), update).mean())
    said = defense.measures(update)["predicted cosine to the true gradient"]
    assert said == pytest.approx(measured, abs=0.01)
    assert said < 0.8


def test_an_attacker_takes_the_update_as_it_came():
    update, defense = layers(), PPFA(at="gradient", direction="random", epsilon=0.0)
    shared = defense.protect(update, make_call(clients=2))
    known = defense.knowledge(shared, Facts())
    assert known.target is shared
    assert all((weight == 1).all() for weight in known.weight.values())


def test_no_guarantee_is_claimed():
    assert not PPFA().guarantee(EXPOSURE).formal


# ---- in use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, fields",
    [
        ("ppfa", {"protocol": "fedavg"}),
        ("ppfa:direction=random", {"protocol": "fedavg", "upload": "delta"}),
        ("ppfa:at=gradient", {"protocol": "fedsgd"}),
        ("ppfa:at=gradient,steps=2", {"protocol": "fedavg"}),
    ],
)
def test_a_round_of_a_federation(spec, fields):
    digits = task("digits", model="mlp:hidden=[16]", clients=3, limit=60)
    given = FederationSettings(rounds=1, **fields)
    run, plain = (federate(digits, defense, given, backend="loop") for defense in (spec, None))
    assert all(torch.isfinite(tensor).all() for tensor in run.params.values())
    moved = sum(float((run.params[n] - plain.params[n]).square().sum()) for n in plain.params) ** 0.5
    assert 0.01 < moved < 3


def test_on_upload_gradients_are_refused_before_training():
    digits = task("digits", model="mlp:hidden=[16]", clients=3, limit=60)
    with pytest.raises(FedveilError, match="ppfa protects weights or a change of weights"):
        federate(digits, "ppfa", FederationSettings(protocol="fedsgd", rounds=1), backend="loop")
    assert defenses.parse("ppfa:at=gradient").of == ("gradient",)


def test_in_anyones_own_loop():
    torch.manual_seed(0)
    model = nn.Linear(50, 40)
    x, y = torch.randn(4, 50), torch.arange(4)
    guard = Guard(model, F.cross_entropy, PPFA(at="gradient"), seed=0)
    guard.backward(x, y)
    true = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    norm = sum(float((p.grad - g).square().sum()) for p, g in zip(model.parameters(), true, strict=True)) ** 0.5
    assert norm == pytest.approx(0.8, rel=1e-4)
    sent = Guard(model, F.cross_entropy, PPFA(direction="random"), seed=0).upload()
    norm = sum(float((sent[n] - p.detach()).square().sum()) for n, p in model.named_parameters()) ** 0.5
    assert norm == pytest.approx(0.8, rel=1e-4)


def test_without_a_batch_there_is_nothing_to_search_on():
    with pytest.raises(FedveilError, match="direction='random'"):
        Guard(nn.Linear(5, 3), F.cross_entropy, PPFA(), seed=0).upload()
