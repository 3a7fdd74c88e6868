"""Unrolled local training: equal to a plain SGD loop, and what it gives an attacker over the pseudo-gradient."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from fedveil.attacks.scene import LocalSteps
from fedveil.attacks.unrolled import after_steps, unrolled
from fedveil.defenses.base import StepsBefore
from fedveil.tree import Tree

from .small import SMOOTH, Choices, as_double, decibels, digits, match, problem_of, task_of


def trained(model, inputs, targets, local, order=None):
    """The pseudo-gradient of torch's own SGD, batch by batch, in this order of each epoch or as they stand."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), 1.0, momentum=local.momentum, weight_decay=local.weight_decay)
    count = len(targets)
    walk = torch.arange(count).repeat(local.epochs) if order is None else order.reshape(-1)
    for rate, batch in zip(local.lr, walk.split(local.batch_sizes), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(own(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    after = dict(own.named_parameters())
    # By how much a constant gradient of 1 would have moved a weight: lr·steps without momentum.
    scale = sum(r * local.momentum**age for step, r in enumerate(local.lr) for age in range(step + 1))
    return {n: (p - after[n]).detach() / scale for n, p in model.named_parameters()}


def even(sizes, lr, epochs=1, **options):
    """Local steps of one rate; every epoch in batches of these sizes."""
    return LocalSteps((lr,) * len(sizes) * epochs, tuple(sizes) * epochs, epochs, **options)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


CASES = {
    "one step": even([6], 0.1),
    "three steps": even([2, 2, 2], 0.3),
    "momentum": even([2, 2, 2], 0.1, momentum=0.9),
    "weight decay": even([2, 2, 2], 0.1, weight_decay=0.05),
    "two epochs with both": even([3, 3], 0.2, 2, momentum=0.5, weight_decay=0.01),
    "a smaller last batch": even([4, 2], 0.2, 2, momentum=0.9),
    "all sizes": even([1, 3, 2], 0.2, 3, weight_decay=0.1),
    "a rate for each step": LocalSteps((0.3, 0.2, 0.1, 0.05), (4, 2, 4, 2), 2, 0.9, 0.02),
}


def loss_of(model):
    def loss(params, buffers, inputs, targets):
        return F.cross_entropy(functional_call(model, params, (inputs,)), targets)

    return loss


def start_of(model):
    return {n: p.detach() for n, p in model.named_parameters()}


def some_data(count=6):
    torch.manual_seed(3)
    return torch.randn(count, 6, dtype=torch.float64), torch.randint(0, 3, (count,))


def orders(local, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(local.examples, generator=generator) for _ in range(local.epochs)])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_equals_plain_sgd(case, shuffled):
    local, model = replace(CASES[case], order="same"), small_model()
    inputs, targets = some_data()
    order = orders(local) if shuffled else None
    expected = trained(model, inputs, targets, local, order)
    found = unrolled(grad(loss_of(model)), local, order, start_of(model), {}, inputs, targets)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("order", ["searched", "same", "mean"])
def test_one_step_is_the_gradient(order):
    model = small_model()
    inputs, targets = some_data()
    found = unrolled(grad(loss_of(model)), even([6], 0.3, order=order), None, start_of(model), {}, inputs, targets)
    expected = grad(loss_of(model))(start_of(model), {}, inputs, targets)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-14)


@given(st.permutations(range(3)), st.permutations(range(3)), st.integers(0, 5))
def test_the_order_within_a_batch_does_not_matter_and_that_of_batches_does(first, second, seed):
    local, model = even([3, 3], 0.5, 2, momentum=0.9), small_model()
    inputs, targets = some_data()

    def update(order):
        made = unrolled(grad(loss_of(model)), local, order, start_of(model), {}, inputs, targets)
        return torch.cat([tensor.flatten() for tensor in made.values()])

    order = orders(local, seed)
    within = torch.tensor([*first, *(3 + place for place in second)])
    torch.testing.assert_close(update(order[:, within]), update(order), rtol=1e-12, atol=1e-14)
    assert not torch.allclose(update(order.roll(3, 1)), update(order), rtol=1e-4)


def test_the_mean_of_all_examples_knows_no_order():
    """Every step takes all examples: the same as full batches, however they are arranged."""
    local, model = even([2, 2, 2], 0.3, 2, momentum=0.5, order="mean"), small_model()
    inputs, targets = some_data()
    expected = trained(model, inputs, targets, LocalSteps(local.lr, (6,) * 6, 6, 0.5))
    for arranged in (torch.arange(6), orders(local)[0]):
        at = start_of(model), {}, inputs[arranged], targets[arranged]
        found = unrolled(grad(loss_of(model)), local, None, *at)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11)


def averaged(model, victims, batch, local):
    """Victims who trained locally on `batch` digits each, and sent what FedAvg sends."""
    inputs, targets, problem = digits(model, victims=victims, batch=batch)
    module = task_of(model).model
    updates = [trained(module, x, y, local) for x, y in zip(inputs, targets, strict=True)]
    return inputs, replace(problem, target=Tree.stack(updates), local=local)


@pytest.mark.parametrize("order", ["searched", "same", "mean"])
def test_the_loop_equals_the_stack(order):
    local = even([2, 2], 0.3, 2, momentum=0.9, weight_decay=0.01, order=order)
    torch.manual_seed(2)
    inputs, targets = torch.randn(3, 4, 6), torch.randint(0, 3, (3, 4))
    problem = as_double(problem_of(small_model().float(), inputs, targets, classes=3))
    problem = replace(problem, local=local)
    choices = Choices(steps=8, signed=False)
    stack, loop = (match(problem, choices, backend=backend) for backend in ("stacked", "loop"))
    torch.testing.assert_close(stack.inputs, loop.inputs, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(stack.costs, loop.costs, rtol=1e-8, atol=1e-10)


def test_the_truth_costs_nothing_when_the_steps_are_unrolled():
    local = even([2, 2], 0.5, 3, order="same")
    inputs, problem = averaged(SMOOTH, 2, 4, local)

    def loss(params, buffers, x, y):
        return F.cross_entropy(functional_call(problem.model, params, (x,)), y)

    found = unrolled(grad(loss), local, None, problem.params.row(0), {}, inputs[0], problem.labels[0])
    for name, value in found.items():
        torch.testing.assert_close(value, problem.target[name][0], rtol=1e-3, atol=1e-5)


def test_unrolling_beats_the_pseudo_gradient():
    """Four digits each, one local step per digit at a largish rate: the mean gradient does not explain the update."""
    local = even([1, 1, 1, 1], 1.0, order="same")
    inputs, problem = averaged(SMOOTH, 3, 4, local)
    std = task_of(SMOOTH).normalization.std
    choices = Choices(steps=150, total_variation=1e-5)
    aware = decibels(match(problem, choices, backend="stacked"), inputs, std).mean()
    naive = decibels(match(replace(problem, local=None), choices, backend="stacked"), inputs, std).mean()
    assert aware > 25, f"unrolled {aware:.1f} dB, pseudo-gradient {naive:.1f} dB"
    assert naive < 15, f"unrolled {aware:.1f} dB, pseudo-gradient {naive:.1f} dB"


def test_the_gradient_after_steps_is_that_of_a_moved_model():
    model = small_model()
    inputs, targets = torch.randn(6, 6, dtype=torch.float64), torch.randint(0, 3, (6,))

    def loss(params, buffers, inputs, targets):
        return F.cross_entropy(functional_call(model, params, (inputs,)), targets)

    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    found = after_steps(grad(loss), StepsBefore(3, 0.2), params, {}, inputs, targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        gradient = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    for name in gradient:
        torch.testing.assert_close(found[name], gradient[name], rtol=1e-9, atol=1e-11)


def test_an_attacker_who_repeats_the_steps_recovers_more():
    """Victims that made two steps first, as FedBARRE does; the attacker tries one, two and three and keeps the best."""
    inputs, targets, problem = digits(SMOOTH, victims=3, batch=2)
    module = task_of(SMOOTH).model

    def loss(params, buffers, x, y):
        return F.cross_entropy(functional_call(module, params, (x,)), y)

    weights = problem.params.row(0)
    shared = [
        after_steps(grad(loss), StepsBefore(2, 2.0), weights, {}, x, y) for x, y in zip(inputs, targets, strict=True)
    ]
    problem = replace(problem, target=Tree.stack(shared))
    supposed = tuple(StepsBefore(steps, 2.0) for steps in (1, 2, 3))
    std = task_of(SMOOTH).normalization.std
    choices = Choices(steps=150, total_variation=1e-5)
    naive = match(problem, choices, backend="stacked")
    aware = match(replace(problem, before=supposed), choices, backend="stacked")
    assert (aware.cost < naive.cost).all()
    gain = decibels(aware, inputs, std).mean() - decibels(naive, inputs, std).mean()
    assert gain > 3, f"only {gain:.1f} dB more"
