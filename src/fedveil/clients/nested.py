"""Tensors in nested dicts and tuples, all with the client as their first axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_nested(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The function applied to every tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: map_nested(function, value) for name, value in tree.items()}
    return tuple(map_nested(function, value) for value in tree)


def zip_nested(function: Callable[[list[Tensor]], Tensor], trees: list[Any]) -> Any:
    """The function applied to the tensors at equal places of several trees: `torch.stack` or `torch.cat`."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(trees)
    if isinstance(first, Mapping):
        return {name: zip_nested(function, [tree[name] for tree in trees]) for name in first}
    return tuple(zip_nested(function, list(column)) for column in zip(*trees, strict=True))


def stack_one_by_one(trees: Iterator[Any], count: int) -> Any:
    """The tensors at equal places of so many trees, stacked.

    Each is copied as it comes, so that the next one can have its memory.
    """
    first = next(trees)
    if count == 1:
        return map_nested(lambda tensor: tensor.unsqueeze(0), first)
    stacked = map_nested(lambda tensor: tensor.new_empty(count, *tensor.shape), first)
    _put(stacked, 0, first)
    del first
    for place in range(1, count):
        _put(stacked, place, next(trees))  # not in a loop over the trees, which would hold on to one
    return stacked


def _put(stacked: Any, place: int, tree: Any) -> None:
    if isinstance(tree, Tensor):
        stacked[place] = tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            _put(stacked[name], place, value)
    else:
        for into, value in zip(stacked, tree, strict=True):
            _put(into, place, value)


def pad_clients(tree: Any, count: int) -> Any:
    """Whole dummy clients, copies of the first, behind the others."""

    def pad(tensor: Tensor) -> Tensor:
        missing = count - tensor.shape[0]
        # Contiguous in either case: a compiled function is specialized to strides too.
        whole = torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])]) if missing else tensor
        return whole.contiguous()

    return map_nested(pad, tree)


def shapes_behind(tree: Any) -> tuple[Any, ...]:
    """The shapes behind the client axis: what a compiled function is specialized to."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape[1:])
    if isinstance(tree, Mapping):
        return tuple((name, shapes_behind(value)) for name, value in sorted(tree.items()))
    return tuple(shapes_behind(value) for value in tree)
