"""Unrolled local training: equal to a plain SGD loop, and what it gives an attacker over the pseudo-gradient."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from fedveil.attacks.scene import LocalSteps
from fedveil.attacks.unrolled import after_steps, unrolled
from fedveil.defenses.base import StepsBefore
from fedveil.tree import Tree

from .small import SMOOTH, Choices, as_double, decibels, digits, match, problem_of, task_of


def trained(model, inputs, targets, local):
    """The pseudo-gradient of torch's own SGD, batch by batch in order, epoch after epoch."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
    batches = list(zip(inputs.split(local.batch_size), targets.split(local.batch_size), strict=True))
    for step in range(local.steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(own(x), y).backward()
        optimizer.step()
    after = dict(own.named_parameters())
    # By how much a constant gradient of 1 would have moved a weight: lr·steps without momentum.
    scale = sum(local.lr * local.momentum**age for step in range(local.steps) for age in range(step + 1))
    return {n: (p - after[n]).detach() / scale for n, p in model.named_parameters()}


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


CASES = {
    "one step": LocalSteps(1, 4, 0.1),
    "three steps": LocalSteps(3, 2, 0.3),
    "momentum": LocalSteps(3, 2, 0.1, momentum=0.9),
    "weight decay": LocalSteps(3, 2, 0.1, weight_decay=0.05),
    "two epochs with both": LocalSteps(4, 3, 0.2, momentum=0.5, weight_decay=0.01),
    "a smaller last batch": LocalSteps(4, 4, 0.2),
    "a batch larger than the data": LocalSteps(2, 9, 0.2),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_plain_sgd(case):
    local, model = CASES[case], small_model()
    inputs, targets = torch.randn(6, 6, dtype=torch.float64), torch.randint(0, 3, (6,))
    expected = trained(model, inputs, targets, local)

    def loss(params, buffers, inputs, targets):
        return F.cross_entropy(functional_call(model, params, (inputs,)), targets)

    params = {n: p.detach() for n, p in model.named_parameters()}
    found = unrolled(grad(loss), local, params, {}, inputs, targets)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11)


def averaged(model, victims, batch, local):
    """Victims who trained locally on `batch` digits each, and sent what FedAvg sends."""
    inputs, targets, problem = digits(model, victims=victims, batch=batch)
    module = task_of(model).model
    updates = [trained(module, x, y, local) for x, y in zip(inputs, targets, strict=True)]
    return inputs, replace(problem, target=Tree.stack(updates), local=local)


def test_the_loop_equals_the_stack():
    local = LocalSteps(4, 2, 0.3, momentum=0.9, weight_decay=0.01)
    torch.manual_seed(2)
    inputs, targets = torch.randn(3, 4, 6), torch.randint(0, 3, (3, 4))
    problem = as_double(problem_of(small_model().float(), inputs, targets, classes=3))
    problem = replace(problem, local=local)
    choices = Choices(steps=8, signed=False)
    stack, loop = (match(problem, choices, backend=backend) for backend in ("stacked", "loop"))
    torch.testing.assert_close(stack.inputs, loop.inputs, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(stack.costs, loop.costs, rtol=1e-8, atol=1e-10)


def test_the_truth_costs_nothing_when_the_steps_are_unrolled():
    local = LocalSteps(6, 2, 0.5)
    inputs, problem = averaged(SMOOTH, 2, 4, local)

    def loss(params, buffers, x, y):
        return F.cross_entropy(functional_call(problem.model, params, (x,)), y)

    found = unrolled(grad(loss), local, problem.params.row(0), {}, inputs[0], problem.labels[0])
    for name, value in found.items():
        torch.testing.assert_close(value, problem.target[name][0], rtol=1e-3, atol=1e-5)


def test_unrolling_beats_the_pseudo_gradient():
    """Four digits each, one local step per digit at a largish rate: the mean gradient does not explain the update."""
    local = LocalSteps(4, 1, 1.0)
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
