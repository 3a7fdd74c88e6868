"""What a model takes: one tensor, or a dict of named tensors. The first axis is the example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fedveil.errors import FedveilError

Inputs = Tensor | dict[str, Tensor]


def leaf(inputs: Inputs, name: str | None) -> Tensor:
    """The tensor of that name; `None` is the name of inputs that are a single tensor."""
    if isinstance(inputs, Tensor):
        if name is None:
            return inputs
        raise FedveilError(f"the inputs are one tensor: there is no part '{name}' (leave the name out)")
    if name is None or name not in inputs:
        wrong = "the inputs have several parts" if name is None else f"the inputs have no part '{name}'"
        raise FedveilError(f"{wrong}: name one of {', '.join(inputs)}")
    return inputs[name]


def with_leaf(inputs: Inputs, name: str | None, value: Tensor) -> Inputs:
    """The same inputs with another tensor under that name; the given inputs are left as they are."""
    leaf(inputs, name)
    if isinstance(inputs, Tensor):
        return value
    return {key: value if key == name else tensor for key, tensor in inputs.items()}


def leaves(inputs: Inputs) -> dict[str | None, Tensor]:
    """Every tensor by its name, in order; a single tensor is named `None`."""
    return {None: inputs} if isinstance(inputs, Tensor) else dict(inputs.items())


def count(inputs: Inputs) -> int:
    """The number of examples: the length of the first axis, which all parts share."""
    if isinstance(inputs, Tensor) and inputs.dim():
        return inputs.shape[0]
    lengths = {tensor.shape[0] if tensor.dim() else None for tensor in leaves(inputs).values()}
    if len(lengths) != 1 or None in lengths:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in leaves(inputs).items())
        raise FedveilError(f"the parts of the inputs must share their first axis, the example: {shapes or 'no parts'}")
    return next(iter(leaves(inputs).values())).shape[0]


def take(inputs: Inputs, index: int | slice | Tensor | Sequence[int]) -> Inputs:
    """The examples at the given indices, of every part."""
    chosen = index if isinstance(index, int | slice | Tensor) else list(index)
    return map_inputs(lambda tensor: tensor[chosen], inputs)


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The function applied to every part."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    return {name: function(tensor) for name, tensor in inputs.items()}


def as_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments to call a model with: one tensor by position, named parts by keyword.

    >>> import torch
    >>> arguments, keywords = as_arguments({"ids": torch.zeros(2, 5), "mask": torch.ones(2, 5)})
    >>> arguments, list(keywords)
    ((), ['ids', 'mask'])
    """
    return ((inputs,), {}) if isinstance(inputs, Tensor) else ((), {**inputs})
