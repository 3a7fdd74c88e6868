"""Label counts behind many local steps: laws of the least squares, and more labels than a read-off finds."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedveil.attacks.label_counts import least_squares_shares, step_weights
from fedveil.attacks.labels import recover_labels, whole_counts
from fedveil.attacks.scene import LocalSteps
from fedveil.defenses.base import step_weight
from fedveil.tree import Tree

from .small import ones, problem_of, task_of
from .test_labels import counts, recovered
from .test_unrolled import even, orders, trained


def averaged(model, labels, local, seed=0):
    """Victims who trained on digits of these labels (V, B), shuffled in every epoch."""
    made = task_of(model)
    known = torch.as_tensor(made.test.labels)
    generator = torch.Generator().manual_seed(seed)
    pools = [(known == c).nonzero().flatten() for c in range(10)]
    drawn = [
        [pools[c][torch.randint(len(pools[c]), (1,), generator=generator)] for c in own] for own in labels.tolist()
    ]
    inputs, targets = made.test.batch(torch.cat([place for own in drawn for place in own]))
    inputs, targets = inputs.reshape(*labels.shape, 1, 8, 8), targets.reshape(labels.shape)
    assert torch.equal(targets, labels)
    problem = problem_of(made.model, inputs, targets, box=made.normalization.box())
    walks = [orders(local, seed + v) for v in range(len(labels))]
    sent = [trained(made.model, x, y, local, walk) for x, y, walk in zip(inputs, targets, walks, strict=True)]
    return replace(problem, target=Tree.stack(sent), behind=local)


def skewed(victims, size, seed=0):
    """Three classes each, most of one of them."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.stack([torch.randperm(10, generator=generator)[:3] for _ in range(victims)])
    mix = torch.tensor([0.6, 0.3, 0.1]).expand(victims, 3)
    return own.gather(1, torch.multinomial(mix, size, replacement=True, generator=generator))


@pytest.mark.parametrize("model", ["lenet", "mlp"])
def test_many_steps_give_away_more_than_is_read_off_as_one(model):
    labels = skewed(12, 16)
    problem = averaged(model, labels, even([4] * 4, 0.1, 5))
    found, one = recover_labels(problem), recover_labels(replace(problem, behind=None))
    told = f"{recovered(found, labels):.2f}, read off as one gradient {recovered(one, labels):.2f}"
    assert recovered(found, labels) > recovered(one, labels) + 0.15, told
    assert bool((counts(found).sum(1) == 16).all())


def test_weight_decay_is_not_taken_for_labels():
    labels, local = skewed(16, 16, seed=3), even([4] * 4, 0.1, 5, weight_decay=0.2)
    problem = averaged("lenet", labels, local)
    aware = recovered(recover_labels(problem), labels)
    unaware = recovered(recover_labels(replace(problem, behind=replace(local, weight_decay=0.0))), labels)
    assert aware > unaware + 0.2, (aware, unaware)


def test_one_local_step_is_read_off_as_a_gradient():
    labels = skewed(6, 8)
    problem = averaged("mlp", labels, even([8], 0.1))
    assert torch.equal(recover_labels(problem), recover_labels(replace(problem, behind=None)))


matrices = st.lists(st.floats(0.01, 1), min_size=25, max_size=25)


@given(matrices, st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_counts_are_exact_where_the_softmax_is_known(entries, labels):
    """A softmax for each class that does not make up for the class itself: then the counts are all that fits."""
    own = torch.eye(5, dtype=torch.float64)
    softmax = torch.tensor(entries, dtype=torch.float64).reshape(5, 5)
    softmax = softmax / softmax.sum(1, keepdim=True) / 2 + 0.1
    truth = F.one_hot(torch.tensor(labels), 5).sum(0)
    matrix = (softmax - own).T
    shares = least_squares_shares(matrix, matrix @ (truth / len(labels)).double(), evenness=0.0)
    found = whole_counts(shares * len(labels), torch.zeros(5).bool(), len(labels))
    assert found.tolist() == sorted(labels)


numbers = st.floats(-1e3, 1e3, allow_nan=False)


@given(st.lists(numbers, min_size=16, max_size=16), st.lists(numbers, min_size=4, max_size=4))
def test_shares_are_shares_whatever_is_given(matrix, gradient):
    shares = least_squares_shares(torch.tensor(matrix).double().reshape(4, 4), torch.tensor(gradient).double())
    assert bool((shares >= 0).all())
    assert float(shares.sum()) == pytest.approx(1)


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8), st.floats(0, 0.99))
def test_the_weights_of_steps_sum_to_the_scale_of_an_update(lr, momentum):
    local = LocalSteps(tuple(lr), (1,) * len(lr), 1, momentum)
    weights = step_weights(local)
    assert sum(weights) == pytest.approx(step_weight(lr, momentum))
    assert weights[-1] == pytest.approx(lr[-1])


@given(st.integers(1, 9), st.lists(st.floats(width=32), min_size=5, max_size=5), st.sampled_from([0.0, 0.9]))
def test_counts_behind_steps_always_sum_to_the_examples(size, gradient, momentum):
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    row = torch.tensor(gradient)
    update = Tree.expand({"weight": row[:, None] * torch.rand(5, 4), "bias": row}, 1)
    problem = problem_of(model, torch.randn(1, size, 4), torch.zeros(1, size, dtype=torch.int64), classes=5)
    behind = LocalSteps((0.1, 0.1), (size, size), 2, momentum)
    labels = recover_labels(replace(problem, target=update, weight=ones(update), behind=behind))
    assert labels.shape == (1, size)
    assert bool(((labels >= 0) & (labels < 5)).all())


def test_a_last_layer_without_a_bias_is_read_off_as_before():
    torch.manual_seed(0)
    model = nn.Linear(4, 5, bias=False)
    problem = problem_of(model, torch.randn(2, 6, 4), torch.randint(0, 5, (2, 6)), classes=5)
    behind = replace(problem, behind=even([3, 3], 0.1))
    assert torch.equal(recover_labels(behind), recover_labels(problem))
