"""Tensors in nested dicts and tuples (no other mappings and sequences), all with the client as their first axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fedveil.tree import Tree


def map_nested(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The function applied to every tensor."""
    if isinstance(tree, dict):
        return {name: map_nested(function, value) for name, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple([map_nested(function, value) for value in tree])
    return function(tree)


def zip_nested(function: Callable[[list[Tensor]], Tensor], trees: list[Any]) -> Any:
    """The function applied to the tensors at equal positions of several trees."""
    first = trees[0]
    if isinstance(first, dict):
        return {name: zip_nested(function, [tree[name] for tree in trees]) for name in first}
    if isinstance(first, tuple):
        return tuple([zip_nested(function, list(column)) for column in zip(*trees, strict=True)])
    return function(trees)


def stack(trees: Iterable[Any]) -> Any:
    """One tree of the trees of some clients. Of a single client, dicts become a `Tree` that stacks when it is read."""
    listed = list(trees)
    return _alone(listed[0]) if len(listed) == 1 else zip_nested(torch.stack, listed)


def _alone(tree: Any) -> Any:
    if isinstance(tree, dict):
        return Tree.expand(tree, 1)
    return tuple([_alone(value) for value in tree]) if isinstance(tree, tuple) else tree.unsqueeze(0)


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
    if isinstance(tree, dict):
        return tuple((name, shapes_behind(value)) for name, value in sorted(tree.items()))
    if isinstance(tree, tuple):
        return tuple(shapes_behind(value) for value in tree)
    return tuple(tree.shape[1:])
