"""Nested arguments and results of compiled code as flat rows of tensors, and back. Dicts go by name, never by order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

Path = list[str | int]  # where a tensor stands: names in dicts, positions in tuples
Paths = list[Path]
Form = Any  # of a result, as JSON: a position in the flat row, a list of forms, or a dict with names and forms


def named(value: Any) -> list[tuple[Path, Tensor]]:
    """Every tensor of nested dicts, tuples and Nones with its place, dicts in the order of their names."""
    return list(_walk(value, []))


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield from _walk(value[name], [*path, name])
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _walk(item, [*path, position])
    elif value is not None:
        raise TypeError(f"{type(value).__name__} is no tensor")


def fetched(arguments: Sequence[Any], paths: Paths) -> list[Tensor]:
    """The tensors at these places."""
    found = []
    for path in paths:
        value: Any = arguments
        for step in path:
            value = value[step]
        found.append(value)
    return found


def replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same nest with other tensors, in the order of `named`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        new = {name: replaced(value[name], tensors) for name in sorted(value)}
        return {name: new[name] for name in value}
    if isinstance(value, list | tuple):
        return tuple([replaced(item, tensors) for item in value])
    return value


def form_of(result: Any, arguments: Sequence[Any]) -> Form:
    """How to nest the flat tensors of a result again.

    A dict with the names of one of the arguments will come in that one's order, as it does uncompiled.
    """
    orders = [(position, set(item)) for position, item in enumerate(arguments) if isinstance(item, Mapping) and item]

    def walk(value: Any, count: Iterator[int]) -> Form:
        if isinstance(value, Tensor):
            return next(count)
        if isinstance(value, Mapping):
            forms = {name: walk(value[name], count) for name in sorted(value)}
            like = next((position for position, names in orders if names == set(forms)), None)
            return {"like": like, "named": {name: forms[name] for name in value}}
        if isinstance(value, list | tuple):
            return [walk(item, count) for item in value]
        raise TypeError(f"{type(value).__name__} is no tensor")

    return walk(result, iter(range(len(named(result)))))


def nested(form: Form, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
    """The tensors of a result in its form."""
    if isinstance(form, int):
        return tensors[form]
    if isinstance(form, list):
        return tuple([nested(item, tensors, arguments) for item in form])
    like = form["like"]
    order = form["named"] if like is None else arguments[like]
    return {name: nested(form["named"][name], tensors, arguments) for name in order}
