"""Reading several labels, or numbers to predict, off the update of a single example.

The gradient of the last layer's bias is that of the loss with respect to the model's output, g. Each row of the
weight's gradient is g times the features before the layer, so their ratio gives the features, and these the output ŷ.
Then the targets y follow from g = ∂loss(ŷ, y)/∂ŷ, which for binary cross-entropy and for the squared error is linear in
y. A loss of which it is not, such as the absolute error, tells no more than a sign, and is refused.

In a batch of several examples, g is a mean: it tells how many have each label, not who, and the mean error of numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedveil.attacks.problem import Problem
from fedveil.errors import FedveilError

ELSE = "give the labels (--labels known) or let the attack optimize them (--labels optimized)"
LINEAR = 1e-4  # by how much, relative to its size, the gradient may miss a line in the targets


def single_targets(problem: Problem) -> Tensor:
    """The targets of single examples: (V, 1, ...), zeros and ones for labels."""
    check_readable(problem)
    weight, bias = output_layer(problem)
    return torch.stack([_targets(problem, victim, weight, bias) for victim in range(problem.count)])


def check_readable(problem: Problem) -> None:
    """Refuse what no targets can be read off, by the form of the updates alone."""
    if problem.batch_size != 1:
        raise FedveilError(
            f"the update of {problem.batch_size} examples tells how many have each label, or their mean error, not who "
            f"has which: use a batch of 1, {ELSE}"
        )
    _check_linear(problem, output_layer(problem)[1])


def output_layer(problem: Problem) -> tuple[str, str]:
    """The names of weight and bias of the last linear layer, which must give one output for each target."""
    outputs = math.prod(problem.form.shape)
    names = [
        name
        for name, module in problem.model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == outputs
    ]
    found = [f"{names[-1]}.{part}".removeprefix(".") for part in ("weight", "bias")] if names else []
    if not found or any(name not in problem.target or name not in problem.params for name in found):
        raise FedveilError(
            "the targets cannot be read off: that takes a last linear layer with a bias and one output for each, both "
            f"in the update; {ELSE}"
        )
    return found[0], found[1]


def _slope(problem: Problem, output: Tensor, targets: Tensor) -> Tensor:
    """∂loss/∂output of one example (outputs,), for the output as the model gives it."""
    with torch.enable_grad():
        live = output.detach().requires_grad_()
        return torch.autograd.grad(problem.loss(live[None], targets[None]), live)[0]


def _targets(problem: Problem, victim: int, weight: str, bias: str) -> Tensor:
    """Those of one victim: (1, ...)."""
    rows, gradient = problem.target[weight][victim], problem.target[bias][victim]
    # The best features for rows ≈ g ⊗ h, in the sense of least squares.
    features = (gradient @ rows) / gradient.square().sum().clamp_min(1e-30)
    output = problem.params[weight][victim] @ features + problem.params[bias][victim]
    free = torch.zeros_like(output).reshape(problem.form.shape)
    start = _slope(problem, output, free)
    unit = _slope(problem, output, free + 1) - start  # each output has its own target: the slope is a diagonal
    found = ((gradient - start) / unit).reshape(problem.form.shape)
    if problem.form.kind == "labels":
        found = (found > 0.5).to(found.dtype)
    return found[None]


def _check_linear(problem: Problem, bias: str) -> None:
    """Refuse a loss whose gradient is not linear in the targets, each output with its own."""
    size = problem.params[bias].shape[1]
    output = torch.linspace(-0.7, 0.9, size, dtype=problem.like.dtype, device=problem.like.device)
    steps = torch.linspace(0.2, 1.1, size, dtype=problem.like.dtype, device=problem.like.device)
    zero = torch.zeros_like(output).reshape(problem.form.shape)
    start = _slope(problem, output, zero)
    unit = _slope(problem, output, zero + 1) - start
    predicted = start + unit * steps
    off = (_slope(problem, output, zero + steps.reshape(problem.form.shape)) - predicted).abs().max()
    if not bool(unit.abs().min() > 0) or not bool(off <= LINEAR * unit.abs().max()):
        raise FedveilError(
            f"the targets cannot be read off: the gradient of this loss does not follow from them in a line; {ELSE}"
        )
