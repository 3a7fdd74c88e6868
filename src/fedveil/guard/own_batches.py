"""What a training loop of someone's own may hand to `Guard`: checked here, refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedveil.clients.engine import Loss
from fedveil.errors import FedveilError
from fedveil.tasks.inputs import Inputs, count


def check_batch(inputs: Inputs, targets: Tensor) -> int:
    """The number of examples of a batch that can be used."""
    parts = [inputs] if isinstance(inputs, Tensor) else list(inputs.values()) if isinstance(inputs, Mapping) else [None]
    if not all(isinstance(part, Tensor) for part in parts):
        raise FedveilError(
            "the inputs must be one tensor, or a dict of tensors that are the model's keyword arguments, not "
            f"{_words(inputs)}"
        )
    if not isinstance(targets, Tensor) or not targets.dim():
        raise FedveilError(f"the targets must be one tensor with a row for each example, not {_words(targets)}")
    size = count(inputs)
    if size != len(targets):
        raise FedveilError(f"there are {size} examples but {len(targets)} targets: each example needs one")
    return size


def mean_loss(loss: Loss | None) -> Loss:
    """The loss, refused where there is none, as `attach` needs none, or where it is not one number."""

    def mean(output: Any, targets: Tensor) -> Tensor:
        if loss is None:
            raise FedveilError("this Guard has no loss: give it one as its second argument")
        value = loss(output, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise FedveilError(f"the loss must be one number, the mean over the batch, not {_words(value)}")
        return value.reshape(()) if value.dim() else value  # a view costs as much as a small layer

    return mean


def _words(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        inside = value.values() if isinstance(value, Mapping) else value
        return f"a {type(value).__name__} of {', '.join(sorted({type(each).__name__ for each in inside})) or 'nothing'}"
    return f"a {type(value).__name__}"
