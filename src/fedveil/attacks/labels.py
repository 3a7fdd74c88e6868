"""Reading labels off an update: what the last layer's gradient says about the classes in the batch.

For cross-entropy, the gradient of the last layer's bias is mean(softmax − one-hot): class c has
count_c = B·(mean softmax_c − g_c). The attacker does not know the softmax of the victim's inputs and estimates it in
two ways: by the model's answer to random inputs, and by its answer to the mean features of the batch, which the ratio
of the last layer's weight and bias gradients gives. The counts are then rounded so that they sum to B.

Behind several local steps there is no one softmax: see `label_counts`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.attacks.label_counts import LastLayer, class_shares
from fedveil.attacks.problem import Problem
from fedveil.attacks.single_targets import single_targets
from fedveil.defenses.base import step_weight
from fedveil.errors import FedveilError

SAMPLES = 64  # random inputs that the model is asked with


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


def read_label(problem: Problem) -> Tensor:
    """iDLG: the label of a single example is the class whose score gradient is most negative. Shape (V, 1).

    Several labels and numbers are solved for, see `single_targets`.
    """
    if problem.batch_size != 1:
        raise FedveilError("iDLG reads the label of a single example: use a batch of 1, or labels = 'recovered'")
    if problem.form.kind != "class":
        return single_targets(problem)
    return _class_gradient(problem)[0].argmin(1, keepdim=True)


def recover_labels(problem: Problem) -> Tensor:
    """The labels of a batch with their repeats, sorted within each victim: shape (V, B).

    Several labels and numbers can be read off for a single example only, see `single_targets`.
    """
    if problem.form.kind != "class":
        return single_targets(problem)
    gradient, softmax = _class_gradient(problem)
    shares = softmax - gradient
    if problem.behind is not None and problem.behind.steps > 1:
        shares = _shares_behind_steps(problem, shares)
    expected = problem.batch_size * shares
    # A negative gradient cannot come without an example of that class.
    pairs = zip(expected, gradient < 0, strict=True)
    return torch.stack([whole_counts(counts, present, problem.batch_size) for counts, present in pairs])


def _class_gradient(problem: Problem) -> tuple[Tensor, Tensor]:
    """Estimates of mean(softmax − one-hot) and of mean(softmax) for every victim: shapes (V, classes).

    The bias gradient is the first of them itself. Without a bias the row sums of the weight gradient stand in, divided
    by the features' sum as random inputs have it: right as far as the features' sum is alike for all inputs.
    """
    layer = last_linear(problem.model, problem.classes)
    weight, bias = (f"{layer}.{part}".removeprefix(".") for part in ("weight", "bias"))
    if weight not in problem.target:
        raise FedveilError(
            f"labels cannot be read off: the update does not hold the last layer ({weight}); "
            "give the labels (--labels known) or let the attack optimize them"
        )
    softmax, features = _answers(problem, layer)
    rows = problem.target[weight]
    if bias not in problem.target:
        return rows.sum(-1) / features.sum(1, keepdim=True), softmax
    gradient = problem.target[bias]
    # Each row over its bias gradient is a mean of the batch's features; added up by size, the well-known ones count.
    features = (rows * gradient.sign().unsqueeze(2)).sum(1) / gradient.abs().sum(1, keepdim=True).clamp_min(1e-30)
    scores = torch.einsum("vcf,vf->vc", problem.params[weight], features)
    if bias in problem.params:
        scores = scores + problem.params[bias]
    return gradient, (softmax + scores.softmax(-1)) / 2


def _shares_behind_steps(problem: Problem, read_off: Tensor) -> Tensor:
    """The shares (V, classes) of the classes behind several local steps.

    What was read off as one gradient, which is right for one step, counts for as much as one of the steps. It is all
    there is for victims whose update is not finite, and for a last layer without a bias.
    """
    assert problem.behind is not None
    one = 1 / problem.behind.steps
    layer = last_linear(problem.model, problem.classes)
    weight, bias = (f"{layer}.{part}".removeprefix(".") for part in ("weight", "bias"))
    if not all(name in tree for name in (weight, bias) for tree in (problem.target, problem.params)):
        return read_off
    softmax, features = _answers(problem, layer)
    moved = problem.target * step_weight(problem.behind.lr, problem.behind.momentum)
    after = _answers(replace(problem, params=problem.params - moved), layer)[1]
    found = read_off.double().cpu()
    for v in range(problem.count):
        parts = (problem.params[weight], problem.params[bias], problem.target[weight], problem.target[bias], softmax)
        own = [part[v].detach().double().cpu() for part in (*parts, (features + after) / 2)]
        if all(bool(part.isfinite().all()) for part in own):
            shares = class_shares(LastLayer(*own).without_decay(problem.behind), problem.behind)
            found[v] = one * found[v] + (1 - one) * shares
    return found.to(read_off.device)


def whole_counts(expected: Tensor, present: Tensor, size: int) -> Tensor:
    """The labels whose counts are nearest to the expected ones, sum to the batch size and hold the present classes."""
    expected = torch.nan_to_num(expected.double(), nan=0.0, posinf=size, neginf=0.0).clamp(0, size)
    counts = torch.maximum(expected.floor(), present.double())
    while int(counts.sum()) < size:
        counts[(expected - counts).argmax()] += 1
    while int(counts.sum()) > size:
        spare = counts > present if bool((counts > present).any()) else counts > 0
        counts[(expected - counts).masked_fill(~spare, torch.inf).argmin()] -= 1
    labels: Tensor = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts.long())
    return labels


def _answers(problem: Problem, layer: str) -> tuple[Tensor, Tensor]:
    """Mean softmax and mean features before the last layer on random inputs: shapes (V, classes) and (V, features)."""
    streams = problem.streams.fold("labels")
    caught: list[Tensor] = []

    def catch(module: nn.Module, arguments: Any) -> None:
        caught.append(arguments[0].flatten(0, -2).mean(0))

    softmax = []
    once = problem.params.repeated and problem.buffers.repeated  # all victims have one model
    handle = problem.model.get_submodule(layer).register_forward_pre_hook(catch)
    try:
        for v in range(1 if once else problem.count):
            inputs = streams.rows([v]).normal(SAMPLES, *problem.shape)[0].to(problem.like)
            if problem.box is not None:
                inputs = inputs.clamp(*problem.box)
            softmax.append(problem.output(v, inputs).softmax(-1).mean(0))
    finally:
        handle.remove()
    return torch.stack(softmax).expand(problem.count, -1), torch.stack(caught).expand(problem.count, -1)
