"""The analytic attack on real digits: exact where it can be, and honest where it cannot."""

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.attacks.analytic import REPRODUCED, Analytic, Replay, input_layer, solutions, unexplained
from fedveil.attacks.scene import Public, Scene
from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates
from fedveil.errors import FedveilError
from fedveil.leakage.assignment import assign
from fedveil.leakage.metrics import psnr
from fedveil.streams import Streams
from fedveil.tasks.layout import Layout
from fedveil.tasks.task import task
from fedveil.tree import Tree

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
TRIES = 2**12


@cache
def task_of(data="digits", model="mlp"):
    return task(data, model=model, seed=0, data_root=DATA if data == "mnist" else None)


def batches(made, victims, size):
    """(inputs (V, B, ...), labels (V, B)) of the first test examples."""
    inputs, labels = made.test.batch(range(victims * size))
    return inputs.reshape(victims, size, *inputs.shape[1:]), labels.reshape(victims, size)


def scene_of(made, inputs, labels, chain=None, *, told=True):
    """What an attacker who knows the defense sees of these batches; `told`: and their labels."""
    count, chain = len(labels), Chain.of(chain)
    params = Tree.expand({name: value.detach() for name, value in made.model.named_parameters()}, count)
    buffers = Tree.expand(dict(made.model.named_buffers()), count)
    engine = Engine(made.model, F.cross_entropy, backend="loop")
    batch = ClientBatch(engine, params, buffers, inputs, labels, Streams.seeded(11, range(count)))
    message = chain.step(batch, chain.new_states()).update
    layout = Layout("pictures", tuple(inputs.shape[2:]), made.normalization.box())
    return Scene(
        public=Public(made.model, F.cross_entropy, layout, 10),
        updates=Updates("gradient", params, message, buffers, (0.1,), (labels.shape[1],)),
        streams=Streams.seeded(1, range(count)),
        chain=chain,
        labels=labels if told else None,
    )


def scored(made, found, inputs):
    """PSNR of every reconstruction with its original (V, B), and the order in which they were matched."""
    matched, order = assign(found.inputs, inputs)
    return psnr(matched.flatten(0, 1), inputs.flatten(0, 1), made.normalization.std).reshape(order.shape), order


def solved(scene):
    return list(solutions(scene, TRIES))


@pytest.mark.parametrize(("size", "victims"), [(1, 6), (4, 3), (8, 2)])
@pytest.mark.parametrize("told", [True, False])
def test_batches_are_recovered_exactly_with_their_labels(size, victims, told):
    made = task_of()
    inputs, labels = batches(made, victims, size)
    scene = scene_of(made, inputs, labels, told=told)
    found = Analytic(tries=TRIES).run(scene)
    decibels, order = scored(made, found, inputs)
    assert decibels.min() >= 80
    assert torch.equal(found.labels.gather(1, order), labels)
    assert found.cost.max() < 1e-5
    assert found.inputs.dtype == inputs.dtype
    assert found.cost.shape == (victims,)
    assert all(bool(solution.reproduced.all()) for solution in solved(scene))


def test_updates_in_double_precision_are_solved_to_their_own_rounding():
    made = task_of()
    inputs, labels = batches(made, 1, 4)
    model = copy.deepcopy(made.model).double()
    wide = scene_of(SimpleNamespace(model=model, normalization=made.normalization), inputs.double(), labels)
    (solution,) = solved(wide)
    assert torch.cdist(solution.inputs.flatten(1), inputs[0].flatten(1).double()).amin(1).max() < 1e-6
    assert solution.cost < 1e-12


def test_every_victim_alone_gives_the_same_to_the_bit():
    made = task_of()
    inputs, labels = batches(made, 3, 4)
    scene = scene_of(made, inputs, labels)
    whole = Analytic(tries=TRIES).run(scene)
    for victim, piece in enumerate(Analytic().pieces(scene)):
        alone = Analytic(tries=TRIES).run(piece)
        assert torch.equal(alone.inputs[0], whole.inputs[victim])
        assert torch.equal(alone.labels[0], whole.labels[victim])


def test_progress_is_told_victim_by_victim():
    made, told = task_of(), []
    scene = scene_of(made, *batches(made, 3, 1))
    bench = replace(scene.bench, report=lambda done, total: told.append((done, total)))
    Analytic().run(replace(scene, bench=bench))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_the_check_rejects_wrong_inputs_and_wrong_labels():
    made = task_of()
    inputs, labels = batches(made, 1, 4)
    scene = scene_of(made, inputs, labels)
    gradient = scene.updates.gradient["1.weight"][0].double()
    basis = torch.linalg.svd(gradient, full_matrices=False).U[:, :4]
    replay = Replay.of(scene, 0, "1")
    true = inputs[0].flatten(1).double()
    others = made.test.batch(range(10, 14))[0].flatten(1).double()
    mixed = 0.8 * true + 0.2 * true.roll(1, 0)
    right = replay.misfits(true, labels[0], basis)
    assert right.diagonal().max() < 1e-4
    assert torch.where(labels[0][:, None] == labels[0], torch.inf, right).min() > 2 * REPRODUCED  # another's label
    for wrong in (others, mixed, -true, torch.zeros_like(true)):
        assert replay.misfits(wrong, torch.arange(10), basis).min() > REPRODUCED


def test_what_the_inputs_do_not_explain_is_the_cost():
    made = task_of()
    inputs, labels = batches(made, 1, 4)
    gradient = scene_of(made, inputs, labels).updates.gradient
    rows = torch.cat([gradient["1.weight"][0], gradient["1.bias"][0, :, None]], 1).double()
    true = inputs[0].flatten(1).double()
    assert unexplained(rows, true) < 1e-5
    assert 0.1 < unexplained(rows, true[:2]) < 1
    assert unexplained(rows, true[:0]) == 1


@pytest.mark.parametrize(
    ("chain", "size", "least"),
    [
        ("gradient-dropout:keep=0.6,sigma=0.005", 1, 80),
        ("gradient-dropout:keep=0.6,sigma=0.005", 2, 60),
        ("gradient-pruning:prune=0.5", 1, 60),
        ("gaussian-noise:sigma=0.0001", 1, 60),
        ("gaussian-noise:sigma=0.0001", 2, 40),
        ("clip:norm=0.1", 4, 80),
    ],
)
def test_known_defenses_are_seen_through(chain, size, least):
    made = task_of()
    inputs, labels = batches(made, 4, size)
    found = Analytic(tries=TRIES).run(scene_of(made, inputs, labels, chain, told=False))
    decibels, order = scored(made, found, inputs)
    assert decibels.median() >= least, decibels
    assert torch.isfinite(found.inputs).all()
    assert torch.isfinite(found.cost).all()
    assert (found.labels.gather(1, order) == labels).double().mean() >= 0.75


def test_knowing_the_dropout_is_what_sees_through_it():
    made = task_of()
    inputs, labels = batches(made, 4, 1)
    scene = scene_of(made, inputs, labels, "gradient-dropout:keep=0.6,sigma=0.005")
    naive = Analytic().run(replace(scene, chain=Chain()))
    assert scored(made, naive, inputs)[0].median() < 40
    assert naive.cost.min() > 0.1


@pytest.mark.parametrize("chain", ["gaussian-noise:sigma=1", "gradient-pruning:prune=0.999", "sign-compression"])
@pytest.mark.parametrize("size", [1, 4])
def test_what_cannot_be_solved_is_finite_and_said_to_be_a_guess(chain, size):
    made = task_of()
    inputs, labels = batches(made, 2, size)
    scene = scene_of(made, inputs, labels, chain, told=False)
    found = Analytic(tries=256).run(scene)
    low, high = (bound.item() for bound in made.normalization.box())
    assert torch.isfinite(found.inputs).all()
    assert found.inputs.min() >= low
    assert found.inputs.max() <= high
    assert found.cost.min() == 1
    assert not any(bool(solution.reproduced.any()) for solution in solved(scene))


def test_sigmoids_hide_batches_but_not_single_examples():
    made = task_of(model="mlp:hidden=[64],activation=sigmoid")
    for size, exact in ((1, True), (3, False)):
        inputs, labels = batches(made, 2, size)
        found = Analytic(tries=256).run(scene_of(made, inputs, labels))
        assert (scored(made, found, inputs)[0].min() >= 80) == exact
        assert (found.cost.max() < 1e-3) == exact


def test_repeated_examples_are_found_as_often_as_they_are_there():
    made = task_of()
    inputs, labels = batches(made, 1, 4)
    order = torch.tensor([0, 1, 1, 2, 1])
    inputs, labels = inputs[:, order], labels[:, order]
    for told in (True, False):
        scene = scene_of(made, inputs, labels, told=told)
        (solution,) = solved(scene)
        found = Analytic(tries=TRIES).run(scene)
        decibels, matched = scored(made, found, inputs)
        assert decibels.min() >= 80
        assert torch.equal(found.labels.gather(1, matched), labels)
        assert bool(solution.reproduced.all())


def test_inputs_that_the_span_hides_are_guesses_beside_those_that_rows_show():
    """Without any search, rows in which one example is active still show theirs."""
    made = task_of()
    inputs, labels = batches(made, 1, 8)
    (solution,) = solutions(scene_of(made, inputs, labels, told=False), 1)
    assert 0 < int(solution.reproduced.sum()) < 8
    sure = solution.inputs[solution.reproduced].flatten(1)
    assert torch.cdist(sure, inputs[0].flatten(1).double()).amin(1).max() < 1e-4
    assert solution.cost > 0.01
    assert solution.labels.sort().values.tolist() == labels[0].sort().values.tolist()


def test_a_dead_layer_gives_a_finite_guess_at_full_cost():
    made = task_of()
    inputs, labels = batches(made, 2, 3)
    scene = scene_of(made, inputs, labels, told=False)
    dead = scene.updates.message.map(torch.zeros_like)
    found = Analytic(tries=64).run(replace(scene, updates=replace(scene.updates, message=dead)))
    assert torch.isfinite(found.inputs).all()
    assert found.cost.tolist() == [1, 1]
    assert found.labels.shape == (2, 3)


def test_entries_that_are_not_finite_are_left_out():
    made = task_of()
    inputs, labels = batches(made, 1, 1)
    scene = scene_of(made, inputs, labels)
    broken = {name: tensor.clone() for name, tensor in scene.updates.message.items()}
    broken["1.weight"][0, 3, 5], broken["1.bias"][0, 7] = torch.nan, torch.inf
    found = Analytic().run(replace(scene, updates=replace(scene.updates, message=Tree(broken))))
    assert scored(made, found, inputs)[0].min() >= 80


@pytest.mark.parametrize("kind", ["weights", "delta"])
def test_one_local_step_with_weight_decay_tells_as_much_as_its_gradient(kind):
    made = task_of()
    inputs, labels = batches(made, 2, 4)
    scene = scene_of(made, inputs, labels)
    before, decay, lr = scene.updates.before, 0.01, 0.1
    change = -(scene.updates.message + before * decay) * lr
    updates = replace(
        scene.updates, kind=kind, message=change if kind == "delta" else before + change, lr=(lr,), weight_decay=decay
    )
    found = Analytic(tries=TRIES).run(replace(scene, updates=updates))
    assert scored(made, found, inputs)[0].min() >= 60  # weights are rounded more coarsely than their change


class Twice(nn.Module):
    """Uses its first layer for the input and again."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(self.layer(x.flatten(1)))


class Hidden(nn.Module):
    """Its layers are not in the order in which they run."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 16)
        self.first = nn.Linear(16, 16)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1))))


def frozen():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    model[1].bias.requires_grad_(False)
    return model


def test_the_layer_that_takes_the_input_is_found():
    layout = Layout("pictures", (1, 4, 4))
    assert input_layer(Hidden(), layout) == "first"
    assert input_layer(nn.Linear(16, 3), Layout("records", (16,))) == ""
    assert input_layer(nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(16, 3).double()), layout) == "2"


@pytest.mark.parametrize(
    "model",
    [
        Twice(),
        frozen(),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
        nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Linear(8, 3)),  # takes the rows of a picture one by one
        nn.Sequential(nn.Flatten(), nn.Sigmoid(), nn.Linear(16, 3)),
        nn.Embedding(5, 3),
    ],
    ids=["twice", "frozen", "no bias", "convolution", "rows", "changed", "no picture"],
)
def test_models_without_such_a_layer_are_refused_in_one_line(model):
    with pytest.raises(FedveilError, match="needs a trained linear layer with a bias") as refused:
        Analytic().check_model(model, Layout("pictures", (1, 4, 4)))
    assert "\n" not in str(refused.value)


def test_looking_for_the_layer_leaves_the_model_and_the_random_numbers_alone():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 3))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with pytest.raises(FedveilError):
        Analytic().check_model(nn.Sequential(nn.Dropout(0.5), model), Layout("pictures", (1, 4, 4)))
    assert torch.equal(torch.rand(1), expected)
    assert model[0].num_batches_tracked == 0
    assert not model[2]._forward_pre_hooks


@pytest.mark.skipif(not (DATA / "mnist").exists(), reason="the MNIST files are not there")
@pytest.mark.parametrize(("size", "victims"), [(1, 8), (8, 2)])
def test_mnist_is_recovered_exactly(size, victims):
    made = task_of("mnist")
    inputs, labels = batches(made, victims, size)
    found = Analytic().run(scene_of(made, inputs, labels, told=False))
    decibels, order = scored(made, found, inputs)
    assert decibels.min() >= 80
    assert torch.equal(found.labels.gather(1, order), labels)
