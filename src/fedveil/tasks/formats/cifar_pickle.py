"""The pickles of CIFAR's Python version, read without running what they contain.

A pickle is a program. This reader knows only the instructions that CIFAR's files use, both the original ones (Python 2)
and copies saved again by Python 3, and the four names they call: numpy's array, its type, the function that makes an
empty array, and the one that makes bytes from text. None of the four is numpy's or Python's own: stand-ins record what
they are given, and an array is made from that at the end.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import FedveilError

LIMIT = 2**29  # bytes; the largest file (CIFAR-100's training part) has 155 MB

# Left out on purpose: other ways to make or call classes, extension codes, persistent ids, and whatever allocates
# memory by a number in the file.
_INSTRUCTIONS = (
    *(pickle.PROTO, pickle.STOP, pickle.FRAME, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL),
)


def read_cifar_pickle(path: Path) -> dict[str, Any]:
    """The contents of a CIFAR batch, by name: arrays of uint8, lists of numbers and names, text."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LIMIT:
                raise FedveilError(f"{path}: larger than {LIMIT:,} bytes, which no file of CIFAR is")
            content = file.read(size)  # this allocates as much memory as `size` says
    except OSError as error:
        raise FedveilError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        found = _Reader(content).load()
    except _Refused as error:
        raise FedveilError(f"{path}: not a file of CIFAR: {error}; it was not read further") from None
    except Exception as error:  # a damaged pickle can fail in any of its instructions
        shown = type(error).__name__
        raise FedveilError(f"{path}: cut short or damaged, or not a file of CIFAR ({shown}); get it again") from None
    if not isinstance(found, dict):
        raise FedveilError(f"{path}: not a file of CIFAR: it holds {type(found).__name__}, expected a dict")
    return {_text(key): value.array(path) if isinstance(value, _Array) else value for key, value in found.items()}


class _Refused(Exception):
    """The file asks for something that CIFAR's files do not hold."""


class _Type:
    """Stands in for numpy's type; only uint8 is known."""

    def __init__(self, code: object, *_: object) -> None:
        if _text(code) not in ("u1", "|u1", "uint8"):
            raise _Refused(f"it holds an array of type {code!r:.40}, expected bytes")

    def take(self, state: object) -> None:
        """Byte order and the like: bytes have none."""


class _Array:
    """Stands in for numpy's array until the whole file has been read."""

    def __init__(self) -> None:
        self._state: tuple[Any, ...] = ()

    def take(self, state: object) -> None:
        """Version, shape, type, whether the first axis is fastest, content."""
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _Type):
            raise _Refused("it holds an array of an unknown form")
        self._state = state

    def array(self, path: Path) -> NDArray[np.uint8]:
        """The array, if shape and content agree."""
        if not self._state:
            raise FedveilError(f"{path}: not a file of CIFAR: it holds an array without content")
        _, shape, _, fortran, content = self._state
        right = isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
        if not right or not isinstance(content, bytes) or math.prod(shape) != len(content):
            size = len(content) if isinstance(content, bytes) else 0
            raise FedveilError(f"{path}: an array says it is {shape!r:.40} and has {size:,} bytes; get the file again")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


def _empty_array(kind: object, shape: object, code: object) -> _Array:
    if kind is not _Array or shape != (0,) or not isinstance(code, bytes):
        raise _Refused("it asks for an array of an unknown form")
    return _Array()


def _as_bytes(text: object, encoding: object) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise _Refused("it asks for text in an unknown encoding")
    return text.encode("latin1")


_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("_codecs", "encode"): _as_bytes,
}


def _unknown(instruction: int) -> Callable[[Any], None]:
    def refuse(_: Any) -> None:
        raise _Refused(f"it has the pickle instruction {instruction:#04x}, which CIFAR's files do not use")

    return refuse


class _Reader(pickle._Unpickler):  # the one in Python, whose instructions can be chosen
    """An unpickler with few instructions. The one in C would allocate whatever a number in the file says."""

    stack: list[Any]

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), fix_imports=False, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        """One of the four known names."""
        if (module, name) not in _NAMES:
            raise _Refused(f"it asks for {f'{module}.{name}'!r:.100}")
        return _NAMES[module, name]

    def call(self) -> None:
        """Call a known function; the plain `_Array` is a name, not a function."""
        arguments = self.stack.pop()
        function = self.stack[-1]
        if function not in (_Type, _empty_array, _as_bytes) or not isinstance(arguments, tuple):
            raise _Refused("it calls something that is not known")
        self.stack[-1] = function(*arguments)

    def tell(self) -> None:
        """Give a stand-in its state."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _Type):
            raise _Refused("it changes something that is not an array")
        self.stack[-1].take(state)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: _unknown(code) for code in range(256)},
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _INSTRUCTIONS},
        pickle.REDUCE[0]: call,
        pickle.BUILD[0]: tell,
    }


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
