"""Models and data from the user's own Python files: `file.py:Net`, `folder/file.py:dataset`.

A file is imported as a module of this package whose name contains its path and the hash of its text. A worker process
that unpickles something therefore imports the very same file, and a file that has changed is another module.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fedveil.errors import FedveilError, one_line, unknown_name

_REFERENCE = re.compile(r"(?P<path>.+\.py):(?P<name>[^:/\\]*)", re.DOTALL)
_FIELDS = re.compile(r"[\w-]+:\s*[\w-]+\s*=")  # a registered name with fields
_MODULE = re.compile(rf"{re.escape(__name__)}\.file_([0-9a-f]{{64}})_([0-9a-f]+)")


def is_reference(text: object) -> bool:
    """Whether a text names something in a Python file.

    >>> is_reference("nets/mine.py:Net"), is_reference("resnet18:norm=group"), is_reference("image-folder:path=a.py")
    (True, False, False)
    """
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None and not _FIELDS.match(text)


@dataclass(frozen=True)
class Reference:
    """The name of something in a Python file. The file is not run before `load`."""

    path: Path
    name: str

    @classmethod
    def read(cls, text: str) -> Reference:
        """Parse `file.py:name`, relative to the working folder; the file must exist."""
        found = _REFERENCE.fullmatch(text)
        if found is None or not found["name"].isidentifier():
            raise FedveilError(f"cannot read '{text}': write file.py:name, with the name of something in the file")
        path = Path(os.path.abspath(Path(found["path"]).expanduser()))
        if not path.is_file():
            raise FedveilError(f"there is no file {path}")
        return cls(path, found["name"])

    def __str__(self) -> str:
        """With the full path, so that it works from any folder."""
        return f"{self.path}:{self.name}"

    @property
    def short(self) -> str:
        """Without the folder, for messages and reports."""
        return f"{self.path.name}:{self.name}"

    def sha256(self) -> str:
        """The hash of the file's text."""
        return hashlib.sha256(_text(self.path)).hexdigest()

    def load(self) -> Any:
        """Run the file, once, and return what the name stands for."""
        module = _module(self.path)
        if not hasattr(module, self.name):
            names = [name for name in vars(module) if not name.startswith("_")]
            raise unknown_name(f"name in {self.path.name}", self.name, names)
        return getattr(module, self.name)

    def call(self, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
        """Call the function with those of the offered values that it has parameters for."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # some functions in C have no signature
            parameters = []
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        taken = {each.name: offered[each.name] for each in named if each.name in offered}
        missing = [each.name for each in named if each.default is each.empty and each.name not in taken]
        if missing:
            known = f" (only {' and '.join(offered)} can be given)" if offered else ""
            raise FedveilError(f"{self.short} needs {', '.join(missing)}{known}: give defaults, or a function without")
        with _told(self.path):
            return function(**taken)


class _told:
    """Turns whatever the user's code raises into one line that names the line of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception | SystemExit):
            return
        if isinstance(error, SyntaxError) and error.filename == str(self._path):
            line, said = error.lineno, f"{type(error).__name__}: {error.msg}"
        else:
            lines = [each.lineno for each in traceback.extract_tb(trace) if each.filename == str(self._path)]
            line = lines[-1] if lines else None
            said = one_line(error, typed=True)
        where = f" line {line}" if line is not None else ""
        raise FedveilError(f"{self._path.name}{where}: {said}") from error


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FedveilError(f"cannot read {path}: {error.strerror}") from None


def _module(path: Path) -> ModuleType:
    name = f"{__name__}.file_{hashlib.sha256(_text(path)).hexdigest()}_{os.fsencode(path).hex()}"
    # Modules beside it can be imported, as if it were run as a script, but never hide what is installed. Worker
    # processes start with the same search path.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    with _told(path):
        return importlib.import_module(name)


class _Loader(importlib.machinery.SourceFileLoader):
    """Always reads the source: cached bytecode is matched by modification time in seconds, which is too coarse."""

    def path_stats(self, path: str | bytes) -> Mapping[str, Any]:
        raise OSError("no bytecode is kept")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of this package: each name contains the path of its file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = _MODULE.fullmatch(fullname)
        if found is None:
            return None
        file = Path(os.fsdecode(bytes.fromhex(found[2])))
        if hashlib.sha256(_text(file)).hexdigest() != found[1]:
            raise FedveilError(f"{file} has changed while it was in use: start again")
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file)))


if not any(type(finder).__qualname__ == _Finder.__qualname__ for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
