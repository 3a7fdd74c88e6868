"""Check with one tiny forward pass whether the model fits the data, before any long work starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter

from fedveil.errors import FedveilError, one_line
from fedveil.tasks.examples import Examples
from fedveil.tasks.inputs import Inputs, as_arguments, leaf, leaves, map_inputs
from fedveil.tasks.regression import squared_error
from fedveil.tasks.splits import Parts

_KINDS = {"class": "class numbers", "labels": "rows of zeros and ones", "numbers": "numbers", "tokens": "tokens"}
# Losses of torch that broadcast predictions (N, 1) against targets (N,).
_COMPARING = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)

Loss = Callable[[Any, Tensor], Tensor]  # (the model's output, targets) -> mean over the batch, a scalar


def check_model(model: nn.Module) -> None:
    """The model must have parameters to train, all of them known and finite."""
    if not isinstance(model, nn.Module):
        raise FedveilError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise FedveilError(
            f"{type(model).__name__} has lazy layers: run one batch through it first, to set their shapes"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise FedveilError(
            f"{type(model).__name__} has no parameters that require gradients: there is nothing to train"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise FedveilError(f"the model's weights {name} are complex: use real ones, in two parts if necessary")
        if not torch.isfinite(parameter).all():
            raise FedveilError(f"the model's weights contain NaN or infinity: {name}")


def floating_type(model: nn.Module) -> torch.dtype:
    """The type of the model's weights, in which it takes its inputs."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def check_fit(model: nn.Module, loss: Loss, parts: Parts, perturb: str | None) -> int | None:
    """Run the examples with the smallest and the largest label through model and loss.

    Returns the number of classes: the width of the model's output if it is one row of scores per example and the labels
    fit it, otherwise `None`. There are no classes if an example can have several labels.
    """
    labels = parts.train.labels
    given = [part for part in (parts.train, parts.validation, parts.test) if part is not None]
    if len({part.labels.shape[1:] for part in given}) > 1:
        raise FedveilError("the parts of the data differ in the number of labels per example")
    if len({part.target.kind for part in given}) > 1:
        kinds = ", ".join(sorted({_KINDS[part.target.kind] for part in given}))
        raise FedveilError(f"the parts of the data differ in what their targets are: {kinds}")
    extremes = {0, len(labels) - 1} if labels.dim() == 2 else {int(labels.argmin()), int(labels.argmax())}
    inputs, targets = parts.train.batch(sorted(extremes))
    if perturb is not None and not leaf(inputs, perturb).is_floating_point():
        raise FedveilError(f"the part to perturb, '{perturb}', holds whole numbers: defenses can only perturb floats")
    weight = next(model.parameters())
    inputs, targets = map_inputs(lambda tensor: tensor.to(weight.device), inputs), targets.to(weight.device)
    arguments, keywords = as_arguments(inputs)
    shapes = ", ".join(f"{name + ' ' if name else ''}{tuple(t.shape)}" for name, t in leaves(inputs).items())
    with _undisturbed(model), torch.enable_grad():
        try:
            output = model(*arguments, **keywords)
        except Exception as error:  # a user's model may raise anything
            hint = _channels_hint(inputs)
            raise FedveilError(
                f"the model does not take a batch of shape {shapes}{hint}: {one_line(error, typed=True)}"
            ) from error
        width = output.shape[1] if isinstance(output, Tensor) and output.dim() == 2 else None
        single = width is not None and parts.train.target.kind == "class"
        fits = single and all(_in_range(part, width or 0) for part in given)
        if loss is functional.cross_entropy:
            _check_scores(output, len(targets), width)
            if not fits:
                raise FedveilError(_label_problem(parts, width or 0))
        if loss in _COMPARING and parts.train.numbers and getattr(output, "shape", None) != targets.shape:
            raise FedveilError(
                f"the model gives {_shown(output)} for a batch of {len(targets)} and the targets are "
                f"{tuple(targets.shape)}: torch's loss would compare each prediction with each target; leave the loss "
                "out, or give targets of the output's shape"
            )
        if loss is squared_error and not (isinstance(output, Tensor) and output.numel() == targets.numel()):
            raise FedveilError(
                f"the model gives {_shown(output)} for a batch of {len(targets)}, expected {tuple(targets.shape)}: one "
                "prediction for each number to predict; if the targets are classes, give whole numbers, targets.long()"
            )
        if loss is functional.binary_cross_entropy_with_logits and width != targets.shape[-1]:
            raise FedveilError(
                f"the model gives {_shown(output)} for a batch of {len(targets)}, expected "
                f"({len(targets)}, {targets.shape[-1]}): one score per label"
            )
        try:
            value = loss(output, targets)
        except Exception as error:
            raise FedveilError(f"the loss fails on the model's output: {one_line(error, typed=True)}") from error
    _check_loss(value)
    return width if fits and width != 1 else None


def _channels_hint(inputs: Inputs) -> str:
    """A hint for a common mistake: pictures with the channels last, as files and numpy have them."""
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or inputs.shape[3] not in (1, 3, 4):
        return ""
    return " (if these are height, width and channels, write images.permute(0, 3, 1, 2))"


def _check_scores(output: Any, examples: int, width: int | None) -> None:
    if width is None or output.shape[0] != examples:
        raise FedveilError(
            f"the model gives {_shown(output)} for a batch of {examples}, expected ({examples}, classes); "
            "for another kind of output give your own loss"
        )
    if width < 2:
        raise FedveilError("the model has one output per example, which cross-entropy cannot use: give your own loss")


def _shown(output: Any) -> str:
    return str(tuple(output.shape)) if isinstance(output, Tensor) else type(output).__name__


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor) or value.dim() != 0:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise FedveilError(f"the loss must give one number, the mean over the batch, not {shown}")
    if not value.requires_grad:
        raise FedveilError("the loss does not depend on the model's parameters: is something detached?")
    if not torch.isfinite(value):
        raise FedveilError(f"the loss of the untrained model is {value.item()}: check the model's weights and the loss")


def _in_range(part: Examples | None, width: int) -> bool:
    return part is None or bool(part.labels.min() >= 0 and part.labels.max() < width)


def _label_problem(parts: Parts, width: int) -> str:
    for name, part in (("training", parts.train), ("validation", parts.validation), ("test", parts.test)):
        if part is not None and not _in_range(part, width):
            wrong = int(part.labels.min() if part.labels.min() < 0 else part.labels.max())
            return (
                f"label {wrong} in the {name} data, but the model has {width} outputs: labels must be 0 to {width - 1}"
            )
    raise AssertionError("called only when a label is out of range")


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; afterwards restore every module's mode and torch's random state."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
