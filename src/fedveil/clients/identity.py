"""What a function's compiled form depends on, as a hash: settings and code of a model and its loss, but not weights.

Tensors that the function is given as arguments count by name alone. All others, such as parameters that are not
trained, end up inside of the compiled code and count by their bytes.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)


class Untold(Exception):
    """Something whose code or settings cannot be told from others'."""


def identity(values: Iterable[Any], given: Mapping[str, Tensor]) -> str | None:
    """A SHA-256 of all values with the code of their classes; None where it cannot be told, as of a lambda.

    given: the tensors that are arguments, by name.
    """
    teller = _Teller({id(tensor): name for name, tensor in given.items()})
    digest = hashlib.sha256()
    try:
        for value in values:
            for word in teller.words(value):
                digest.update(word.encode() + b"\0")
        for module in sorted(teller.modules):
            digest.update(f"{module} {_source(module)}".encode())
    except (Untold, RecursionError):
        return None
    return digest.hexdigest()


def code_of(*packages: str) -> str:
    """A SHA-256 of the source text of packages."""
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(str(sys.modules[package].__file__)).parent
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class _Teller:
    """Walks through values and notes the modules whose code they run."""

    def __init__(self, given: Mapping[int, str]) -> None:
        self._given = given
        self._inside: set[int] = set()  # what is being walked through: a circle has no end
        self.modules: set[str] = set()

    def words(self, value: Any) -> Iterator[str]:
        """The value as a row of words."""
        if isinstance(value, Tensor):
            yield self._tensor(value)
        elif isinstance(value, enum.Enum) or type(value) in _PLAIN:
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType):
            yield self._named(value)
        else:
            if id(value) in self._inside:
                raise Untold
            self._inside.add(id(value))
            yield self._named(type(value))
            for part in self._parts(value):
                yield from self.words(part)
            yield "end"
            self._inside.remove(id(value))

    def _tensor(self, tensor: Tensor) -> str:
        if id(tensor) in self._given:
            return f"argument {self._given[id(tensor)]}"
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(content).hexdigest()}"

    def _named(self, value: Any) -> str:
        name = getattr(value, "__qualname__", "<")
        if "<" in name:  # a lambda, or something that was defined inside of a function
            raise Untold
        module = (getattr(value, "__module__", None) or "builtins").replace("__mp_main__", "__main__")
        self.modules.add(module)
        return f"{module}.{name}"

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                if not isinstance(name, int):  # hooks are kept under numbers that count up over a whole process
                    yield name
                yield item
        elif isinstance(value, set | frozenset):
            yield from sorted(map(repr, value))
        elif isinstance(value, list | tuple):
            yield from value
        elif hasattr(value, "__dict__"):
            yield vars(value)
        else:
            raise Untold


def _source(module: str) -> str:
    """The hash of a module's text; nothing of what the versions of Python and torch stand for."""
    top = module.partition(".")[0]
    if top == "torch" or top in sys.stdlib_module_names:
        return ""
    try:
        path = inspect.getsourcefile(sys.modules[module])
        return hashlib.sha256(Path(str(path)).read_bytes()).hexdigest()
    except (KeyError, OSError, TypeError):  # typed into a console
        raise Untold from None
