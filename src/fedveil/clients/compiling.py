"""`torch.compile`, used so that it neither falls back silently nor fails a run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from shutil import which
from typing import Any

import torch

from fedveil.errors import one_line

log = logging.getLogger("fedveil")


def compile_once(function: Callable[..., Any], name: str, *, keep_layout: bool = False) -> Callable[..., Any]:
    """`torch.compile` of one function for one set of shapes, with a code object of its own.

    Dynamo counts recompilations per code object, and every `vmap` in a process shares one: after a few models it
    would silently stop compiling. A copy of the code object gives each function its own count, and `fullgraph`
    turns a fall-back into an error; that error is reported once, and the function runs uncompiled from then on.

    keep_layout: do not put channels last, which is faster for small images and slower for large kernels.
    """

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    code = call.__code__.replace(co_name=f"fedveil_{name}")
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    options: dict[str, Any] = {"layout_optimization": False} if keep_layout else {}
    if hasattr(torch.compiler, "skip_all_guards_unsafe"):  # the release that lets guards be chosen
        options["guard_filter_fn"] = _worth_checking
    compiled = torch.compile(own, fullgraph=True, dynamic=False, options=options or None)
    ready = failed = False

    def run(*arguments: Any) -> Any:
        nonlocal ready, failed
        if not failed:
            try:
                if ready:
                    return compiled(*arguments)
                with without_compiler_log():
                    result = compiled(*arguments)
                ready = True
                return result
            except Exception as error:  # the compiler's own errors share no base class
                failed = True
                log.warning("%s runs uncompiled: %s", name, one_line(error))
        return function(*arguments)

    return run


# How Dynamo names what belongs to libraries.
_LIBRARIES = (
    "__import__('torch')",
    "G['__builtins",
    *(f"G['__import_{name}" for name in ("torch", "fedveil", "contextlib", "functools", "types")),
)


def _worth_checking(guards: Sequence[Any]) -> list[bool]:
    """Which guards are checked before every call, to see whether the compiled code still fits.

    Those on arguments, on the model with all its layers and on torch's state are. Those on the code of libraries are
    not: it does not change while a process runs, and hundreds of checks took a tenth of a small model's gradients.
    """
    return [not guard.name.startswith(_LIBRARIES) for guard in guards]


@contextlib.contextmanager
def without_compiler_log() -> Iterator[None]:
    """A graph that the compiler cannot handle is reported in one line; its own log would run to thousands.

    Nor are its warnings shown that torch uses what torch will not have for ever.
    """
    noisy = logging.getLogger("torch._inductor")
    level = noisy.level
    noisy.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        noisy.setLevel(level)


_compiler: list[bool] = []


def compiler_found() -> bool:
    """Whether there is a C++ compiler; if not, a warning says so once."""
    if not _compiler and which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")):
        _compiler.append(True)  # torch would take seconds to say so: it imports its compiler first
    if not _compiler:
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
            _compiler.append(True)
        except Exception as error:  # torch raises InvalidCxxCompiler, a class that moved between releases
            _compiler.append(False)
            reason = one_line(error)
            log.warning("no C++ compiler was found (%s): going on uncompiled; install g++ for speed", reason)
    return _compiler[0]
