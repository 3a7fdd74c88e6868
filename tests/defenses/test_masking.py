"""Gradient masking: its closed forms, and what an attacker makes of the zeros."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedveil.attacks.match import cosine
from fedveil.defenses.base import Facts
from fedveil.defenses.masking import GradientMasking
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.guard.guard import Guard
from fedveil.tasks.task import task
from fedveil.tree import Tree

from .laws import EXPOSURE, make_call


def normal(clients=2, entries=20_000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Tree({"w": torch.randn(clients, entries, generator=generator), "b": torch.ones(clients, 3_000)})


def protect(defense, update, seed=0):
    return defense.protect(update, make_call(clients=update.count, seed=seed))


def test_the_papers_share_is_the_default():
    assert GradientMasking().share == 0.25


@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_entries_are_kept_exactly_or_zero_and_the_share_is_right(share):
    update = normal()
    shared = protect(GradientMasking(share=share), update)
    for name in update:
        kept = shared[name] != 0
        assert torch.equal(shared[name][kept], update[name][kept])
        for client in kept:
            deviation = (share * (1 - share) / client.numel()) ** 0.5
            assert abs(float(client.float().mean()) - (1 - share)) < 4.5 * deviation
    assert not torch.equal(shared["w"][0] != 0, shared["w"][1] != 0)  # each client draws its own


@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_predicted_cosine_is_the_measured_one(share):
    update, defense = normal(entries=200_000), GradientMasking(share=share)
    shared = protect(defense, update)
    measured = (shared.dot(update) / (shared.norm() * update.norm())).mean()
    said = defense.measures(update)
    assert said["predicted cosine to the true gradient"] == pytest.approx(float(measured), rel=0.02)
    assert said["predicted cosine to the true gradient"] == pytest.approx((1 - share) ** 0.5)
    assert said["share of entries kept"] == pytest.approx(1 - share)


@settings(max_examples=40, deadline=None)
@given(
    share=st.floats(0, 0.99),
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30),
    seed=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_nothing_but_zeros_is_made(share, values, seed, dtype):
    update = Tree({"w": torch.tensor([values, values], dtype=dtype)})
    shared = protect(GradientMasking(share=share), update, seed)["w"]
    assert shared.dtype == dtype
    assert ((shared == update["w"]) | (shared == 0)).all()


def test_an_attacker_who_matches_the_support_sees_the_true_gradient():
    update, defense = normal(), GradientMasking(share=0.5)
    shared = protect(defense, update)
    known = defense.knowledge(shared, Facts())
    ones = dict(shared.map(torch.ones_like).row(0))
    # The cost of the true gradient: an attack that found it would stop there.
    naive = float(cosine(update.row(0), shared.row(0), ones))
    adaptive = float(cosine(update.row(0), known.target.row(0), known.weight.row(0)))
    assert naive == pytest.approx(1 - 0.5**0.5, abs=0.02)
    assert adaptive == pytest.approx(0, abs=1e-5)


def test_several_local_steps_are_scaled_back():
    update, defense, steps = normal(1), GradientMasking(share=0.5), 4
    mean = Tree({n: torch.zeros_like(t) for n, t in update.items()})
    for seed in range(steps):
        mean = mean + protect(defense, update, seed) / steps
    known = defense.knowledge(mean, Facts(kind="delta", steps=steps))
    error = [((guess - update).map(torch.square)["b"] * known.weight["b"]).mean() for guess in (mean, known.target)]
    assert error[1] < error[0]
    seen = known.weight["b"] > 0
    assert float(known.target["b"][seen].mean()) == pytest.approx(1, abs=0.03)  # the true entries are all 1


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_a_round_of_a_federation(protocol):
    digits = task("digits", model="mlp:hidden=[16]", clients=3, limit=60)
    run = federate(digits, GradientMasking(), FederationSettings(protocol=protocol, rounds=1), backend="loop")
    assert all(torch.isfinite(tensor).all() for tensor in run.params.values())
    assert any(not torch.equal(run.params[n], p) for n, p in digits.model.named_parameters())


def test_in_anyones_own_loop():
    model = nn.Linear(50, 40)
    Guard(model, F.cross_entropy, GradientMasking(), seed=0).backward(torch.randn(4, 50), torch.arange(4))
    assert float((model.weight.grad == 0).float().mean()) == pytest.approx(0.25, abs=0.05)


def test_no_guarantee_is_claimed():
    assert not GradientMasking().guarantee(EXPOSURE).formal


def test_masked_entries_do_not_keep_their_sign():
    """−0.0 is a zero to every comparison, but goes out as another number than 0.0."""
    shared = protect(GradientMasking(share=0.9), normal(entries=2_000))
    assert not any((torch.signbit(tensor) & (tensor == 0)).any() for tensor in shared.values())
