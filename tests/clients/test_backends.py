"""Every backend gives what a plain loop over clients with `loss.backward()` gives."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.clients.engine import Engine
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.inputs import map_inputs
from fedveil.tree import Tree

from .plain import (
    MODELS,
    STACKABLE,
    assert_trees_close,
    call,
    client_model,
    make_case,
    plain_example_gradients,
    plain_gradients,
)

EVERY = [(name, "loop") for name in MODELS] + [(name, "stacked") for name in STACKABLE]
every_model_and_backend = pytest.mark.parametrize("name, backend", EVERY)
both_backends = pytest.mark.parametrize("backend", ["loop", "stacked"])
# What a model draws by itself has no plain counterpart here: see test_own_randomness.py.
NO_EXAMPLES = {"batch norm", "small of everything", "averaging batch norm", "functional dropout"}
COMPARABLE = pytest.mark.parametrize("name, backend", [pair for pair in EVERY if pair[0] != "functional dropout"])


@COMPARABLE
def test_gradient_buffers_and_loss_equal_plain_backward(name, backend):
    case = make_case(name)
    update, buffers, losses, _ = plain_gradients(case)
    result = case.engine(backend).gradient(*case.arguments())
    assert_trees_close(result.update, update)
    assert_trees_close(result.buffers, buffers)
    torch.testing.assert_close(result.loss, losses)
    assert not any(tensor.requires_grad for tensor in (*result.update.values(), result.loss))


@COMPARABLE
def test_input_gradient_equals_plain_backward(name, backend):
    case = make_case(name)
    _, _, losses, leaves = plain_gradients(case)
    gradient, loss = case.engine(backend).input_gradient(*case.arguments())
    torch.testing.assert_close(gradient, leaves, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, losses)


@COMPARABLE
def test_loss_equals_plain_forward(name, backend):
    case = make_case(name)
    torch.testing.assert_close(case.engine(backend).loss(*case.arguments()), plain_gradients(case)[2])


@pytest.mark.parametrize("name, backend", [pair for pair in EVERY if pair[0] not in NO_EXAMPLES])
def test_example_gradients_equal_single_backward_passes(name, backend):
    case = make_case(name)
    found = case.engine(backend).example_gradients(*case.arguments())
    assert_trees_close(found, plain_example_gradients(case))


@pytest.mark.parametrize("name", ["conv", "mlp", "tied", "frozen", "named inputs", "layer norm", "batch norm in eval"])
@both_backends
def test_mean_of_example_gradients_is_the_gradient(name, backend):
    case = make_case(name)
    engine = case.engine(backend)
    every = engine.example_gradients(*case.arguments())
    assert_trees_close(every.map(lambda tensor: tensor.mean(1)), engine.gradient(*case.arguments()).update)


@both_backends
def test_example_gradients_under_batch_norm_are_refused(backend):
    case = make_case("batch norm")
    with pytest.raises(FedveilError, match="batch norm"):
        case.engine(backend).example_gradients(*case.arguments())


@both_backends
def test_batch_norm_statistics_move_and_count(backend):
    case = make_case("batch norm")
    moved = case.engine(backend).gradient(*case.arguments()).buffers
    assert moved["1.num_batches_tracked"].tolist() == [1, 2, 3]  # they began at 0, 1, 2
    assert moved["1.num_batches_tracked"].dtype == torch.int64
    assert not torch.equal(moved["1.running_mean"], case.buffers["1.running_mean"])


@both_backends
def test_unused_parameters_have_zero_gradients(backend):
    case = make_case("unused")
    update = case.engine(backend).gradient(*case.arguments()).update
    assert not update["unused.weight"].any()
    assert update["used.weight"].any()


@both_backends
def test_frozen_parameters_are_absent(backend):
    case = make_case("frozen")
    assert set(case.engine(backend).gradient(*case.arguments()).update) == {"2.weight", "2.bias"}


@pytest.mark.parametrize("name", ["conv", "batch norm", "dropout"])
@both_backends
@pytest.mark.parametrize("kind", ["gradient", "input_gradient", "example_gradients", "loss"])
def test_float64_agrees_to_its_own_precision(name, backend, kind):
    if (name, kind) == ("batch norm", "example_gradients"):
        pytest.skip("refused")
    case = make_case(name, dtype=torch.float64)
    found = getattr(case.engine(backend), kind)(*case.arguments())
    if kind == "example_gradients":
        assert_trees_close(found, plain_example_gradients(case), 1e-12)
        return
    update, buffers, losses, leaves = plain_gradients(case)
    if kind == "gradient":
        assert_trees_close(found.update, update, 1e-12)
        assert_trees_close(found.buffers, buffers, 1e-12)
        found = found.loss
    elif kind == "input_gradient":
        torch.testing.assert_close(found[0], leaves, rtol=1e-12, atol=1e-12)
        found = found[1]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["conv", "batch norm", "dropout", "named inputs"])
def test_chunks_of_any_size_give_the_same(name):
    case = make_case(name, clients=7)
    whole = case.engine("stacked", chunk=7).gradient(*case.arguments())
    for chunk in range(1, 7):
        part = case.engine("stacked", chunk=chunk).gradient(*case.arguments())
        assert_trees_close(part.update, whole.update)
        assert_trees_close(part.buffers, whole.buffers)
        torch.testing.assert_close(part.loss, whole.loss)


@pytest.mark.parametrize("name", ["conv", "dropout"])
@both_backends
def test_a_client_alone_gets_what_it_got_among_others(name, backend):
    case = make_case(name, clients=4)
    whole = case.engine(backend).gradient(*case.arguments())
    order = [2, 0, 3]
    some = case.rows(order).engine(backend).gradient(*case.rows(order).arguments())
    assert_trees_close(some.update, whole.update.rows(order))


@pytest.mark.parametrize("name", ["conv", "batch norm", "dropout"])
@both_backends
@pytest.mark.parametrize("kind", ["gradient", "example_gradients"])
@pytest.mark.parametrize("clients", [1, 3, 5])
def test_shared_weights_equal_copies(name, backend, kind, clients):
    if (name, kind) == ("batch norm", "example_gradients"):
        pytest.skip("refused")
    case = make_case(name, clients=clients)
    case.params = Tree.expand(case.params.row(0), clients)
    shared = getattr(case.engine(backend, chunk=2), kind)(*case.arguments())
    case.params = case.params.map(torch.clone)
    assert not case.params.repeated
    copied = getattr(case.engine(backend, chunk=2), kind)(*case.arguments())
    if kind == "gradient":
        shared, copied = shared.update, copied.update
    assert_trees_close(shared, copied)


@every_model_and_backend
def test_nothing_that_is_passed_in_changes(name, backend):
    case = make_case(name)
    engine = case.engine(backend)
    before = copy.deepcopy((dict(case.params), dict(case.buffers), case.inputs, case.targets))
    model_before = copy.deepcopy(case.model.state_dict())
    engine_before = copy.deepcopy(engine.model.state_dict())
    streams = case.streams()
    for kind in ("gradient", "input_gradient", "loss"):
        getattr(engine, kind)(*case.arguments()[:4], streams)
    after = (dict(case.params), dict(case.buffers), case.inputs, case.targets)
    assert str(before) == str(after)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    torch.testing.assert_close(case.model.state_dict(), model_before, rtol=0, atol=0)
    torch.testing.assert_close(engine.model.state_dict(), engine_before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in (*case.model.parameters(), *engine.model.parameters()))
    assert torch.equal(streams.normal(3), case.streams().normal(3))  # nor were the streams given drawn from


@pytest.mark.parametrize("name", ["conv", "dropout", "batch norm"])
@both_backends
def test_works_where_the_caller_switched_gradients_off(name, backend):
    case = make_case(name)
    expected = plain_gradients(case)
    with torch.no_grad():
        update = case.engine(backend).gradient(*case.arguments()).update
        leaves = case.engine(backend).input_gradient(*case.arguments())[0]
    assert_trees_close(update, expected[0])
    torch.testing.assert_close(leaves, expected[3], rtol=1e-5, atol=1e-5)


# ---- features -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, layer", [("conv", "2"), ("batch norm", "1"), ("dropout", "1"), ("tied", "second")])
@both_backends
def test_features_equal_a_hook_on_the_module(name, layer, backend):
    case = make_case(name)
    found = case.engine(backend).features(layer, *case.arguments())
    for k in range(case.clients):
        caught = []
        model = client_model(case, k)
        model.get_submodule(layer).register_forward_hook(lambda *call, into=caught: into.append(call[2]))
        model(case.inputs[k])
        torch.testing.assert_close(found[k], caught[0], rtol=1e-5, atol=1e-5)


@both_backends
def test_features_are_the_layers_own_output_and_not_what_follows_in_place(backend):
    case = make_case("layer norm")  # a ReLU in place comes next
    found = case.engine(backend).features("1", *case.arguments())
    assert (found < 0).any()


@both_backends
def test_features_leave_no_hook_behind(backend):
    case = make_case("conv")
    engine = case.engine(backend)
    engine.features("0", *case.arguments())
    assert not any(module._forward_hooks for module in engine.model.modules())


@both_backends
def test_features_of_a_missing_or_idle_layer_are_refused(backend):
    case = make_case("unused")
    with pytest.raises(FedveilError, match="no layer 'nowhere'"):
        case.engine(backend).features("nowhere", *case.arguments())
    with pytest.raises(FedveilError, match="'unused'"):
        case.engine(backend).features("unused", *case.arguments())


# ---- sensitivity of what a layer takes in --------------------------------------------------------------


def plain_sensitivity(case, layer, chosen):
    """Features and the norms of their derivatives, one plain backward pass each."""
    features, norms = [], []
    for k in range(case.clients):
        model, caught = client_model(case, k), []
        own = map_inputs(lambda t, k=k: t[k].clone(), case.inputs)
        leaf = own if case.perturb is None else own[case.perturb]
        leaf.requires_grad_()
        model.get_submodule(layer).register_forward_hook(lambda *seen, into=caught: into.append(seen[1][0]))
        call(model, own)
        taken = caught[-1]
        slopes = [torch.autograd.grad(taken[:, i].sum(), leaf, retain_graph=True)[0] for i in chosen[k].tolist()]
        features.append(taken[:, chosen[k]].detach())
        norms.append(torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes], dim=1))
    return torch.stack(features), torch.stack(norms)


SENSED = [
    ("conv", "4"),
    ("mlp", "0"),
    ("batch norm", "6"),
    ("dropout", "4"),
    ("tied", "head"),
    ("named inputs", "head"),
]


@pytest.mark.parametrize("name, layer", SENSED)
@both_backends
def test_sensitivity_equals_single_backward_passes(name, layer, backend):
    case = make_case(name, dtype=torch.float64)
    width = case.model.get_submodule(layer).in_features
    chosen = torch.stack([torch.randperm(width)[:5] for _ in range(case.clients)])
    params, buffers, inputs, _, streams = case.arguments()
    found = case.engine(backend, chunk=2).sensitivity(layer, chosen, params, buffers, inputs, streams)
    torch.testing.assert_close(found, plain_sensitivity(case, layer, chosen), rtol=1e-9, atol=1e-12)
    assert not any(tensor.requires_grad for tensor in found)


@both_backends
def test_sensitivity_refuses_what_it_cannot_serve_and_leaves_no_hook_behind(backend):
    case = make_case("conv")
    params, buffers, inputs, _, streams = case.arguments()
    engine, chosen = case.engine(backend), torch.zeros(case.clients, 1, dtype=torch.int64)
    with pytest.raises(FedveilError, match="no layer 'nowhere'"):
        engine.sensitivity("nowhere", chosen, params, buffers, inputs, streams)
    with pytest.raises(FedveilError, match="one row of features per example"):
        engine.sensitivity("0", chosen, params, buffers, inputs, streams)
    assert not any(module._forward_pre_hooks for module in engine.model.modules())


def test_sensitivity_is_not_compiled(caplog):
    case = make_case("mlp")
    params, buffers, inputs, _, streams = case.arguments()
    chosen = torch.arange(3).expand(case.clients, 3)
    found = case.engine("compiled").sensitivity("0", chosen, params, buffers, inputs, streams)
    torch.testing.assert_close(found, plain_sensitivity(case, "0", chosen))
    assert not caplog.records


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "fast"])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(FedveilError, match="loop, stacked or compiled"):
        Engine(nn.Linear(2, 2), F.cross_entropy, backend=backend)


def test_chunks_are_sized_by_the_model():
    assert Engine(nn.Linear(6, 3), F.cross_entropy).chunk == 32
    assert Engine(nn.Linear(1000, 1000), F.cross_entropy).chunk == 2
    assert Engine(nn.Linear(2000, 2000), F.cross_entropy).chunk == 1


def test_a_transformer_layer_runs_on_the_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(24, 3))
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, 2)
    inputs, targets = torch.randn(2, 4, 3, 8), torch.randint(0, 3, (2, 4))
    for training in (True, False):
        engine = Engine(model.train(training), F.cross_entropy, backend="loop")
        result = engine.gradient(params, Tree({}), inputs, targets, Streams.seeded(0, range(2)))
        assert result.update.isfinite().all()
    plain = torch.stack([F.cross_entropy(model(inputs[k]), targets[k]) for k in range(2)]).detach()  # in eval mode
    torch.testing.assert_close(result.loss, plain)
