"""Soteria: scores against a slow loop of plain autograd, the layer it finds, and how it is undone."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedveil.attacks.match import cosine
from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.defenses.base import Facts
from fedveil.defenses.soteria import Soteria, linear_layer, scores
from fedveil.errors import FedveilError
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.guard.guard import Guard
from fedveil.registry import models
from fedveil.streams import Streams
from fedveil.tasks.task import Task, task
from fedveil.tree import Tree

from .laws import EXPOSURE, call_of, make_batch, make_call

PRUNES = [0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8]  # Gradient Dropout's grid


def image_batch(model, clients=3, size=2, backend="stacked", dtype=torch.float64, shape=(1, 8, 8)):
    """A step on noise images, with weights of each client's own."""
    torch.manual_seed(1)
    model = model.to(dtype)
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return ClientBatch(
        Engine(model, F.cross_entropy, backend=backend),
        Tree({n: p + 0.1 * torch.randn(clients, *p.shape, dtype=dtype) for n, p in trained.items()}),
        Tree.expand(dict(model.named_buffers()), clients),
        torch.randn(clients, size, *shape, dtype=dtype),
        torch.randint(0, 3, (clients, size)),
        Streams.seeded(0, range(clients), "soteria"),
    )


def convolutional(act=nn.Sigmoid):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), act(), nn.Flatten(), nn.Linear(27, 11), act(), nn.Linear(11, 3))


def slow_hidden(model, batch, client, layer, prune):
    """The columns to zero of one client: one plain backward pass per example and feature, and numpy's percentile."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(batch.params[name][client])
    total = np.zeros(own.get_submodule(layer).in_features)
    for example in batch.inputs[client]:
        for i in range(len(total)):
            x = example[None].clone().requires_grad_()
            caught = []
            handle = own.get_submodule(layer).register_forward_hook(lambda m, a, o, into=caught: into.append(a[0]))
            own(x)
            handle.remove()
            r = caught[0][0, i]
            slope = torch.autograd.grad(r, x)[0]
            if r != 0:
                total[i] += float(slope.norm() / r.detach().abs())
    return torch.tensor(total < np.percentile(total, 100 * prune)), torch.tensor(total)


# ---- against the reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize("layer", ["3", "5"])
@pytest.mark.parametrize("act", [nn.Sigmoid, nn.ReLU])
@pytest.mark.parametrize("prune", [0.1, 0.8])
def test_the_columns_are_those_of_a_slow_loop(prune, act, layer, backend):
    model = convolutional(act)
    batch = image_batch(model, backend=backend)
    update = batch.gradient()
    shared = Soteria(prune=prune, layer=layer).protect(update, call_of(batch))
    for client in range(3):
        hidden, _ = slow_hidden(model, batch, client, layer, prune)
        expected = update[f"{layer}.weight"][client].clone()
        expected[:, hidden] = 0
        assert torch.equal(shared[f"{layer}.weight"][client], expected)
    others = [name for name in update if name != f"{layer}.weight"]
    assert all(torch.equal(shared[name], update[name]) for name in others)


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_scores_are_those_of_a_slow_loop(backend):
    model = convolutional()
    batch = image_batch(model, backend=backend)
    found = scores(*batch.sensitivity("3", torch.arange(27).expand(3, 27)))
    for client in range(3):
        torch.testing.assert_close(found[client], slow_hidden(model, batch, client, "3", 0.5)[1], rtol=1e-9, atol=0)


def test_scores_of_a_linear_model_are_known():
    """r = x: every derivative is 1, and the score of pixel i is Σ 1/|x_i|."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    batch = image_batch(model)
    found = scores(*batch.sensitivity("1", torch.arange(64).expand(3, 64)))
    torch.testing.assert_close(found, (1 / batch.inputs.flatten(2).abs()).sum(1))


def test_an_idle_feature_of_an_example_adds_nothing():
    features = torch.tensor([[[0.0, 2.0], [-1.0, 4.0]]])
    norms = torch.tensor([[[5.0, 1.0], [3.0, 1.0]]])
    assert scores(features, norms).tolist() == [[3.0, 0.75]]


@pytest.mark.parametrize("prune", PRUNES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_many_columns_as_foretold(prune, dtype):
    batch = image_batch(convolutional(), dtype=dtype)
    update, defense = batch.gradient(), Soteria(prune=prune, layer="3")
    zeroed = (defense.protect(update, call_of(batch))["3.weight"] == 0).all(1).sum(1)
    said = defense.measures(update)
    assert zeroed.tolist() == [said["columns zeroed of that layer"]] * 3
    assert said["share of all entries zeroed"] == pytest.approx(int(zeroed[0]) * 11 / update.size)


@settings(max_examples=20, deadline=None)
@given(pair=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)))
def test_a_larger_share_hides_the_same_columns_and_more(pair):
    low, high = sorted(pair)
    batch = make_batch()
    update = batch.gradient()
    less, more = (Soteria(prune=p).protect(update, make_call())["2.weight"] == 0 for p in (low, high))
    assert (more | ~less).all()


# ---- a part of the features ------------------------------------------------------------------------------------


def test_only_scored_features_can_be_hidden_and_they_are_drawn_anew():
    batch = image_batch(convolutional())
    update, defense = batch.gradient(), Soteria(prune=0.5, layer="3", features=9)
    first, second = (defense.protect(update, call_of(batch))["3.weight"] == 0 for _ in range(2))
    assert first.all(1).sum(1).tolist() == [4, 4, 4]  # 4 of 9 are below their median
    assert defense.measures(update)["columns zeroed of that layer"] == 4
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])  # each client its own


def test_more_features_than_there_are_is_all():
    batch = image_batch(convolutional())
    update = batch.gradient()
    all_of_them, more = (
        Soteria(layer="3", features=n).protect(update, call_of(batch))["3.weight"] for n in (None, 1_000)
    )
    assert torch.equal(all_of_them, more)


# ---- the layer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lenet", "lenet5", "mlp", "resnet18"])
def test_the_last_linear_layer_is_found_in_every_model(name):
    model = models.build(name).build((1, 32, 32), 10)
    update = Tree({n: p.detach()[None] for n, p in model.named_parameters()})
    found = linear_layer(model, None, update)
    assert model.get_submodule(found).out_features == 10
    # And an attacker who sees the update alone takes the same one.
    left_out = Soteria().knowledge(update, Facts(steps=2)).weight
    assert [n for n in update if not left_out[n].any()] == [f"{found}.weight"]


def test_a_model_that_is_one_linear_layer():
    model = nn.Linear(64, 3)
    Guard(model, F.cross_entropy, Soteria(prune=0.5), seed=0).backward(torch.randn(2, 64), torch.tensor([0, 2]))
    assert int((model.weight.grad == 0).all(0).sum()) == 32


def test_a_frozen_layer_is_passed_over():
    model = convolutional()
    model[5].requires_grad_(False)
    update = Tree({n: p.detach()[None] for n, p in model.named_parameters() if p.requires_grad})
    assert linear_layer(model, None, update) == "3"


def test_a_model_without_a_linear_layer_is_refused_before_anything_is_shared():
    model = nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten())
    before = copy.deepcopy(model.state_dict())
    made = Task(model, (torch.rand(40, 1, 8, 8), torch.arange(40) % 3), clients=2)
    with pytest.raises(FedveilError, match="needs a model with a trained linear layer") as caught:
        federate(made, Soteria(), FederationSettings(rounds=1), backend="loop")
    assert "\n" not in str(caught.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("layer", ["0", "nowhere"])
def test_a_layer_that_is_none_is_refused_with_the_names_of_those_that_are(layer):
    batch = image_batch(convolutional())
    with pytest.raises(FedveilError, match=f"no trained linear layer '{layer}'; it has 3, 5"):
        Soteria(layer=layer).protect(batch.gradient(), call_of(batch))


def test_whole_numbers_as_inputs_are_refused():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(FedveilError, match="whole numbers"):
        Guard(model, F.cross_entropy, Soteria()).backward(torch.randint(0, 10, (2, 3)), torch.tensor([0, 1]))


# ---- how it is undone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [None, "5", "3"])
def test_an_attacker_who_leaves_the_columns_out_sees_the_true_gradient(layer):
    batch = image_batch(convolutional())
    update, defense = batch.gradient(), Soteria(layer=layer)
    shared = defense.protect(update, call_of(batch))
    known = defense.knowledge(shared, Facts())
    for k in range(3):
        naive = float(cosine(update.row(k), shared.row(k), shared.map(torch.ones_like).row(k)))
        adaptive = float(cosine(update.row(k), known.target.row(k), known.weight.row(k)))
        assert adaptive == pytest.approx(0, abs=1e-9)
        assert naive > 1e-4
    weight = f"{layer or 5}.weight"
    assert torch.equal(known.weight[weight] == 0, shared[weight] == 0)
    assert all((known.weight[name] == 1).all() for name in update if name != weight)


def test_columns_of_other_layers_that_are_zero_stay_trusted():
    """Black pixels leave zero columns in a first linear layer: they tell the attacker where they are."""
    observed = Tree({"0.weight": torch.ones(1, 4, 5), "2.weight": torch.ones(1, 3, 4)})
    observed["0.weight"][:, :, 2] = 0
    observed["2.weight"][:, :, 1] = 0
    weight = Soteria().knowledge(observed, Facts()).weight
    assert (weight["0.weight"] == 1).all()
    assert weight["2.weight"][0, 0].tolist() == [1, 0, 1, 1]


def test_over_several_steps_the_whole_layer_is_left_out():
    batch = make_batch()
    weight = Soteria().knowledge(batch.gradient(), Facts(kind="delta", steps=3)).weight
    assert not weight["2.weight"].any()
    assert (weight["0.weight"] == 1).all()
    assert (weight["2.bias"] == 1).all()


def test_no_guarantee_is_claimed():
    assert not Soteria().guarantee(EXPOSURE).formal


# ---- in use -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol, backend", list(itertools.product(["fedsgd", "fedavg"], ["loop", "stacked"])))
def test_a_round_of_a_federation(protocol, backend):
    digits = task("digits", model="mlp:hidden=[16]", clients=3, limit=60)
    given = FederationSettings(protocol=protocol, rounds=1)
    run, plain = (federate(digits, defense, given, backend=backend) for defense in (Soteria(prune=0.5), None))
    assert all(torch.isfinite(tensor).all() for tensor in run.params.values())
    last = list(run.params)[-2]
    assert not torch.equal(run.params[last], plain.params[last])


def test_under_batch_norm_nothing_moves_but_the_step():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    plain, guarded = copy.deepcopy(model), copy.deepcopy(model)
    x, y = torch.randn(6, 1, 8, 8), torch.arange(6) % 3
    F.cross_entropy(plain(x), y).backward()
    Guard(guarded, F.cross_entropy, Soteria(prune=0.5), seed=0).backward(x, y)
    torch.testing.assert_close(guarded.state_dict(), plain.state_dict())
    torch.testing.assert_close(guarded[1].weight.grad, plain[1].weight.grad)
    hidden = (guarded[4].weight.grad == 0).all(0)
    assert int(hidden.sum()) == 4
    torch.testing.assert_close(guarded[4].weight.grad[:, ~hidden], plain[4].weight.grad[:, ~hidden])
