"""Reading labels off an update: what the last layer's gradient says about the classes in the batch.

For cross-entropy, the gradient of the last layer's bias is mean(softmax − one-hot): class c has
count_c = B·(mean softmax_c − g_c). The attacker does not know the softmax of the victim's inputs and estimates it by
the model's answer to random inputs; the counts are then rounded so that they sum to B (repeated labels included).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.attacks.problem import Problem
from fedveil.errors import FedveilError


def last_linear(model: nn.Module, classes: int | None) -> str:
    """The name of the layer that gives the class scores: the last linear layer with one output per class."""
    names: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (classes is None or module.out_features == classes)
    ]
    if not names:
        raise FedveilError(
            "labels cannot be read off: the model has no last linear layer with one output per class; "
            "give the labels (--labels known) or let the attack optimize them"
        )
    return names[-1]


def class_gradient(problem: Problem, layer: str) -> Tensor:
    """One number per class with the sign of mean(softmax − one-hot): shape (V, classes).

    The bias gradient is that mean itself; without a bias the row sums of the weight gradient stand in, which have its
    sign where the features are non-negative (after ReLU or a sigmoid), rescaled by the features' estimated sum.
    """
    bias = f"{layer}.bias" if layer else "bias"
    weight = f"{layer}.weight" if layer else "weight"
    if bias in problem.target:
        return problem.target[bias]
    rows = problem.target[weight].sum(-1)
    # The positive and negative parts of mean(softmax − one-hot) cancel; a single example's sum to at most 1 each.
    return rows / rows.clamp_min(0).sum(1, keepdim=True).clamp_min(1e-12)


def read_label(problem: Problem) -> Tensor:
    """iDLG: the label of a single example is the class whose score gradient is most negative. Shape (V, 1)."""
    if problem.batch_size != 1:
        raise FedveilError("iDLG reads the label of a single example: use a batch of 1, or labels = 'recovered'")
    return class_gradient(problem, last_linear(problem.model, problem.classes)).argmin(1, keepdim=True)


def recover_labels(problem: Problem) -> Tensor:
    """The labels of a batch with their repeats, sorted within each victim: shape (V, B)."""
    layer = last_linear(problem.model, problem.classes)
    gradient = class_gradient(problem, layer)
    size = problem.batch_size
    expected = size * (_mean_softmax(problem) - gradient)
    # A negative gradient cannot come without an example of that class.
    counts = torch.where(gradient < 0, expected.clamp_min(1), expected.clamp_min(0))
    return torch.stack([_whole(row, size) for row in counts])


def _whole(counts: Tensor, size: int) -> Tensor:
    """The labels whose counts are nearest to the given ones and sum to the batch size (largest remainders)."""
    if float(counts.sum()) <= 0:
        counts = torch.ones_like(counts)
    if float(counts.sum()) > size:
        counts = counts * (size / counts.sum())
    whole = counts.floor()
    rest = counts - whole
    while int(whole.sum()) < size:
        best = int(rest.argmax())
        whole[best] += 1
        rest[best] -= 1
    labels: Tensor = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), whole.long())
    return labels


def _mean_softmax(problem: Problem, samples: int = 64) -> Tensor:
    """The model's mean answer to random inputs, for every victim's weights: shape (V, classes)."""
    streams = problem.streams.fold("labels")
    answers = []
    for v in range(problem.count):
        inputs = streams.rows([v]).normal(samples, *problem.shape)[0]
        if problem.box is not None:
            inputs = inputs.clamp(*problem.box)
        state = (problem.params.row(v), problem.buffers.row(v))
        with torch.no_grad():
            output: Tensor = functional_call(problem.model, state, (inputs,))
        answers.append(output.softmax(-1).mean(0))
        if problem.params.shared and problem.buffers.shared:
            return answers[0].expand(problem.count, -1)
    return torch.stack(answers)
