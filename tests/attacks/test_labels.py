"""Labels read off the last layer: single ones, batches with repeats, and what cannot be read."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedveil.attacks.labels import read_label, recover_labels
from fedveil.attacks.problem import Problem
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tree import Tree

from .small import Choices, copies, digits, match, ones, problem_of, random_problem, task_of

CLASSES = 10


def counts(labels):
    return F.one_hot(labels, CLASSES).sum(1)


def recovered(found, truth):
    """The share of labels that were found, repeats counted."""
    return float(torch.minimum(counts(found), counts(truth)).sum() / truth.numel())


def chance(truth, tries=50):
    """The same for labels drawn at random."""
    torch.manual_seed(0)
    return sum(recovered(torch.randint_like(truth, CLASSES), truth) for _ in range(tries)) / tries


@pytest.mark.parametrize("model", ["lenet", "mlp", "mlp:hidden=[]"])
def test_idlg_reads_every_single_label(model):
    _, targets, problem = digits(model, victims=40)
    assert torch.equal(read_label(problem), targets)


@pytest.mark.parametrize("batch", [2, 4, 8, 16])
@pytest.mark.parametrize("model", ["lenet", "mlp"])
def test_batches_of_an_untrained_model_are_recovered_with_their_repeats(model, batch):
    _, targets, problem = digits(model, victims=320 // batch, batch=batch)
    found = recover_labels(problem)
    assert found.shape == targets.shape
    rate = recovered(found, targets)
    assert rate > 0.95, f"{rate:.3f}, chance {chance(targets):.3f}"


@pytest.mark.parametrize("batch", [4, 16])
def test_a_batch_of_one_class_and_a_batch_of_two(batch):
    made = task_of("lenet")
    labels = made.test.labels
    one, other = ((labels == c).nonzero().flatten() for c in (3, 8))
    places = torch.cat([one[:batch], one[: batch // 2], other[: batch // 2]])
    inputs, targets = made.test.batch(places)
    targets = targets.reshape(2, batch)
    problem = problem_of(made.model, inputs.reshape(2, batch, 1, 8, 8), targets, box=made.normalization.box())
    assert recovered(recover_labels(problem), targets) >= 0.9


def test_a_trained_model_gives_away_more_than_chance():
    made = task_of("mlp")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.15, 0.15)
    inputs, targets = made.train.batch(range(600))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    inputs, targets = made.test.batch(range(160))
    targets = targets.reshape(40, 4)
    problem = problem_of(model, inputs.reshape(40, 4, 1, 8, 8), targets, box=made.normalization.box())
    assert recovered(recover_labels(problem), targets) > chance(targets) + 0.25


def without_bias():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10, bias=False))


def test_a_last_layer_without_bias():
    made = task_of("mlp")
    inputs, targets = made.test.batch(range(160))
    single = problem_of(without_bias(), inputs[:, None], targets[:, None], box=made.normalization.box())
    assert torch.equal(read_label(single), targets[:, None])
    targets = targets.reshape(20, 8)
    batches = problem_of(without_bias(), inputs.reshape(20, 8, 1, 8, 8), targets, box=made.normalization.box())
    assert recovered(recover_labels(batches), targets) > 0.9


@pytest.mark.parametrize("read", [read_label, recover_labels])
def test_what_cannot_be_read_is_said_in_one_line(read):
    convolutions = nn.Sequential(nn.Conv2d(1, 3, 3, stride=3), nn.AvgPool2d(2), nn.Flatten())
    with pytest.raises(FedveilError, match=r"no last linear layer.*--labels known") as caught:
        read(random_problem(convolutions, (1, 8, 8), batch=1))
    assert "\n" not in str(caught.value)
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 3))
    frozen[2].requires_grad_(False)
    with pytest.raises(FedveilError, match=r"does not hold the last layer \(2\.weight\)"):
        read(random_problem(frozen, (1, 8, 8), batch=1))


def test_idlg_refuses_a_batch():
    _, _, problem = digits("mlp", victims=1, batch=2)
    with pytest.raises(FedveilError, match="use a batch of 1, or labels = 'recovered'"):
        read_label(problem)


def test_a_model_that_is_one_linear_layer():
    model = nn.Linear(6, 3)
    problem = random_problem(model, (6,), victims=8, batch=1)
    assert torch.equal(read_label(problem), problem.labels)


@pytest.mark.parametrize("same_weights", [True, False])
def test_nothing_is_changed_also_under_batch_norm(same_weights):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    made = task_of("mlp")
    inputs, targets = made.test.batch(range(8))
    inputs, targets = inputs.reshape(2, 4, 1, 8, 8), targets.reshape(2, 4)
    problem = problem_of(model, inputs, targets, box=made.normalization.box(), same_weights=same_weights)
    before, state = copies(problem), {n: t.clone() for n, t in model.state_dict().items()}
    recover_labels(problem)
    match(problem, Choices(steps=2, labels="recovered"), backend="stacked")
    assert all(torch.equal(a, b) for a, b in zip(before, copies(problem), strict=True))
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert not model[4]._forward_pre_hooks


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.integers(1, 9), st.lists(numbers, min_size=5, max_size=5), st.booleans())
def test_counts_always_sum_to_the_batch(size, gradient, bias):
    torch.manual_seed(0)
    model = nn.Linear(4, 5, bias=bias)
    row = torch.tensor(gradient)
    target = {"weight": row[:, None] * torch.rand(5, 4)} | ({"bias": row} if bias else {})
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, 1)
    update = Tree.expand(target, 1)
    streams = Streams.seeded(0, [0])
    problem = Problem(model, F.cross_entropy, params, Tree({}), update, ones(update), (4,), size, streams, 5)
    labels = recover_labels(problem)
    assert labels.shape == (1, size)
    assert labels.dtype == torch.int64
    assert bool(((labels >= 0) & (labels < 5)).all())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_exact_counts_come_back_exactly(labels):
    """Where the softmax is the same for every input, nothing has to be estimated."""
    model = nn.Linear(4, 5)
    nn.init.zeros_(model.weight)
    targets = torch.tensor(labels)[None]
    torch.manual_seed(0)
    problem = problem_of(model, torch.randn(1, len(labels), 4), targets, classes=5)
    assert recover_labels(problem).tolist() == [sorted(labels)]


def test_the_attack_uses_what_was_read():
    _, targets, problem = digits("mlp", victims=3)
    unknown = replace(problem, labels=None)
    assert torch.equal(match(unknown, Choices(steps=1, labels="idlg")).labels, targets)
    assert torch.equal(match(unknown, Choices(steps=1, labels="recovered")).labels, targets)
