"""Gradient pruning: counts, closed forms, and what an attacker makes of the zeros."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedveil.attacks.match import cosine
from fedveil.defenses.base import Facts
from fedveil.defenses.pruning import GradientPruning
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.guard.guard import Guard
from fedveil.tasks.task import task
from fedveil.tree import Tree

from .laws import make_call


def normal(clients=2):
    generator = torch.Generator().manual_seed(0)
    return Tree(
        {
            "w": torch.randn(clients, 40, 50, generator=generator),
            "b": 10 * torch.randn(clients, 100, generator=generator),
            "scale": torch.randn(clients, generator=generator),  # one number per client
        }
    )


def protect(defense, update):
    return defense.protect(update, make_call(clients=update.count))


def test_the_papers_setting_is_the_default():
    assert GradientPruning().prune == 0.99


@pytest.mark.parametrize("prune, kept", [(0.0, 100), (0.29, 71), (0.5, 50), (0.99, 1), (0.999, 1)])
def test_the_largest_of_each_tensor_are_kept(prune, kept):
    update = normal()
    shared = protect(GradientPruning(prune=prune), update)
    for k in (0, 1):
        own = shared["b"][k]
        assert int((own != 0).sum()) == kept
        largest = update["b"][k].abs().topk(kept).indices
        assert torch.equal(own[largest], update["b"][k][largest])
    assert torch.equal(shared["scale"], update["scale"])  # at least one entry stays


def test_over_the_whole_model_large_tensors_win():
    update = normal()
    shared = protect(GradientPruning(prune=0.96, scope="model"), update)
    kept = shared.map(lambda t: t != 0)
    assert kept.flat().sum(1).tolist() == [2101 - int(0.96 * 2101)] * 2
    smallest = shared.flat().abs().masked_fill(~kept.flat(), torch.inf).amin(1)
    largest_pruned = update.flat().abs().masked_fill(kept.flat(), 0).amax(1)
    assert (smallest > largest_pruned).all()
    assert kept["b"].float().mean() > 10 * kept["w"].float().mean()


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("prune", [0.3, 0.9, 0.99])
def test_predicted_cosine_is_exactly_the_measured_one(prune, scope):
    update, defense = normal(), GradientPruning(prune=prune, scope=scope)
    shared = protect(defense, update)
    measured = (shared.dot(update) / (shared.norm() * update.norm())).mean()
    said = defense.measures(update)
    assert said["predicted cosine to the true gradient"] == pytest.approx(float(measured), rel=1e-5)
    assert said["share of entries kept"] == pytest.approx(float((shared.flat() != 0).float().mean()))


@settings(max_examples=60, deadline=None)
@given(
    prune=st.floats(0, 0.999),
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30),
    scope=st.sampled_from(["tensor", "model"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_kept_entries_are_exact_and_no_smaller_than_the_pruned(prune, values, scope, dtype):
    update = Tree({"w": torch.tensor([values], dtype=dtype)})
    shared = protect(GradientPruning(prune=prune, scope=scope), update)["w"][0]
    assert shared.dtype == dtype
    true = update["w"][0]
    kept = shared != 0
    assert torch.equal(shared[kept], true[kept])
    if kept.any():
        assert true[~kept].abs().max() <= shared[kept].abs().min() if (~kept).any() else True
    assert int(kept.sum()) >= min(int((true != 0).sum()), round(len(values) * (1 - prune)))


def test_more_pruning_keeps_less():
    update = normal()
    counts = [int((protect(GradientPruning(prune=p), update).flat() != 0).sum()) for p in (0.1, 0.5, 0.9, 0.99)]
    assert counts == sorted(counts, reverse=True)


def test_an_attacker_who_matches_the_support_sees_the_true_gradient():
    update, defense = normal(), GradientPruning(prune=0.9)
    shared = protect(defense, update)
    known = defense.knowledge(shared, Facts())
    naive = float(cosine(update.row(0), shared.row(0), shared.map(torch.ones_like).row(0)))
    adaptive = float(cosine(update.row(0), known.target.row(0), known.weight.row(0)))
    assert adaptive == pytest.approx(0, abs=1e-5)
    assert naive > 0.1


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_a_round_of_a_federation(protocol):
    digits = task("digits", model="mlp:hidden=[16]", clients=3, limit=60)
    run = federate(digits, GradientPruning(prune=0.9), FederationSettings(protocol=protocol, rounds=1), backend="loop")
    assert all(torch.isfinite(tensor).all() for tensor in run.params.values())
    assert any(not torch.equal(run.params[n], p) for n, p in digits.model.named_parameters())


def test_in_anyones_own_loop():
    model = nn.Linear(50, 40)
    Guard(model, F.cross_entropy, GradientPruning(prune=0.9), seed=0).backward(torch.randn(4, 50), torch.arange(4))
    assert int((model.weight.grad != 0).sum()) == 200


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("prune", [0.3, 0.5, 0.99])
def test_of_equal_entries_the_promised_number_is_kept_and_the_first(scope, prune):
    update = Tree({"w": torch.tensor([1.0, -1.0]).repeat(2, 500)})
    kept = GradientPruning(prune=prune, scope=scope).protect(update, make_call(clients=2))["w"]
    count = 1000 - int(prune * 1000 + 1e-9)
    assert (kept != 0).sum(1).tolist() == [count, count]
    assert torch.equal(kept[:, :count], update["w"][:, :count])


@settings(deadline=None)
@given(values=st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, 3.0]), min_size=1, max_size=40), prune=st.floats(0, 0.999))
def test_at_most_the_promised_number_is_kept_whatever_the_ties(values, prune):
    update = Tree({"w": torch.tensor([values])})
    kept = GradientPruning(prune=prune).protect(update, make_call(clients=1))["w"]
    room = len(values) - min(int(prune * len(values) + 1e-9), len(values) - 1)
    assert (kept != 0).sum() == min(room, (update["w"] != 0).sum())
    assert torch.equal(
        kept.abs().sort(descending=True).values[0, :room], update["w"].abs().sort(descending=True).values[0, :room]
    )
