"""Compiled code that is kept: a later run loads in milliseconds what the first one took half a minute to make.

A package is a library of native code for one function of nested tensors and one set of shapes. Its key is a hash of
all that its code depends on: source and settings of the model, shapes, torch, the processor's instructions, options.
Loading one needs neither a compiler nor tracing. Packages stay in the user's own cache folder, which nobody else may
write to; what cannot be kept there, or not be made, is left to `torch.compile`.

The code takes whatever it is given for tensors of its shapes, unless torch is told to look (`CHECKED`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.clients.compiling import without_compiler_log
from fedveil.clients.leaves import Form, Paths, fetched, form_of, named, nested, replaced
from fedveil.errors import FedveilError, one_line
from fedveil.files import write_atomically
from fedveil.ownership import leased
from fedveil.tasks.cache import cache_folder

log = logging.getLogger("fedveil")

FORMAT = 1
CHECKED = "AOTI_RUNTIME_CHECK_INPUTS"  # torch's setting: refuse inputs of other shapes, strides and types
MOST_KEPT = 200  # packages; those not used for longest go first
MOST_CONSTANTS = 2**26  # bytes of tensors inside of a package
NOTE = {"kind": "note"}  # marks a line of the log that is no warning
# The compiler's time: these leave out what pays for many small compilations only. The wrapper just calls the kernels.
OPTIONS = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.enable_line_tables": False,
    "cpp.vec_isa_ok": True,  # the processor has what torch itself uses
}

os.environ[CHECKED] = "1"


@dataclass(frozen=True, eq=False)
class Wanted:
    """A function that is to be compiled, for arguments like these."""

    name: str  # for messages
    function: Callable[..., Any]  # of nested tensors
    arguments: tuple[Any, ...]
    identity: str | None  # of all that the function depends on beside its arguments; None: it cannot be told
    expected: Callable[[], Any]  # what it gives for these arguments, computed another way
    options: dict[str, Any] = field(default_factory=dict)  # of the compiler
    rewritten: Callable[[Any], Any] | None = None  # makes the traced graph faster


class Package:
    """Loaded code. Tensors are bound by name, as dicts may come in another order than the code was made for."""

    def __init__(self, runner: Any, paths: Paths, form: Form) -> None:
        self._runner, self._paths, self._form = runner, paths, form

    def __call__(self, *arguments: Any) -> Any:
        with torch.no_grad():
            outputs = self._runner.run([_plain(tensor) for tensor in fetched(arguments, self._paths)])
        return nested(self._form, outputs, arguments)


def packaged(wanted: Wanted, *, make: bool = True) -> Package | None:
    """The function's package, checked against what is expected: loaded, or made and kept. None where that fails."""
    try:
        leaves = named(wanted.arguments)
        folder = _folder()
    except (TypeError, FedveilError) as error:
        log.info("%s is not kept as a package: %s", wanted.name, one_line(error))
        return None
    if wanted.identity is None or not all(tensor.device.type == "cpu" for _, tensor in leaves):
        return None
    paths = [path for path, _ in leaves]
    place = folder / _key(wanted, [(path, tuple(tensor.shape), str(tensor.dtype)) for path, tensor in leaves])
    try:
        return _right(_loaded(place, paths), wanted) or (_made(place, wanted, leaves) if make else None)
    except Exception as error:  # the compiler's own errors share no base class
        log.info("%s is not kept as a package: %s", wanted.name, one_line(error))
        return None


def _key(wanted: Wanted, leaves: list[Any]) -> str:
    """A hash of all that the code depends on. No tracing, which takes seconds, goes into it."""
    machine = (platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    options = (sorted(wanted.options.items()), wanted.rewritten is not None)
    modes = (torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype())
    told = (FORMAT, torch.__version__, machine, wanted.name, wanted.identity, leaves, options, modes)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:40]


def _folder() -> Path:
    """The folder of packages, which is nobody else's: what is in there is run."""
    if not hasattr(os, "geteuid"):
        raise FedveilError("this system does not tell whose a file is")
    folder = cache_folder() / "packages"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise FedveilError(f"cannot use {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise FedveilError(f"{folder} must be a folder of this user alone (mode 0700)")
    return folder


# ---- loading -------------------------------------------------------------------------------------------------


def _loaded(place: Path, paths: Paths) -> Package | None:
    """A package that was kept; None where there is none that is whole and one's own."""
    code, head = place.with_suffix(".so"), place.with_suffix(".json")
    try:
        told = json.loads(_own_bytes(head))
        whole = hashlib.sha256(_own_bytes(code)).hexdigest() == told["sha256"]
        if not whole or (told["format"], told["paths"]) != (FORMAT, paths):
            return None
        form = told["form"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(code), 1)
    with contextlib.suppress(OSError):
        os.utime(code)  # it is in use
    return Package(runner, paths, form)


def _own_bytes(path: Path) -> bytes:
    """The content of a file that only this user can have written."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise OSError("not a file of this user alone")
        return file.read()


def _right(package: Package | None, wanted: Wanted) -> Package | None:
    """The package, if it gives what is expected."""
    if package is None:
        return None
    outputs = [tensor for _, tensor in named(package(*wanted.arguments))]
    expected = [tensor for _, tensor in named(wanted.expected())]
    if len(outputs) == len(expected) and all(map(_alike, outputs, expected)):
        return package
    log.warning("the compiled %s does not give what the model gives: it is not used", wanted.name)
    return None


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    off = (found - expected).double().nan_to_num(posinf=0.0, neginf=0.0)
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return False
    size = expected.double().nan_to_num(posinf=0.0, neginf=0.0).norm()
    return bool(off.norm() <= 1e-3 * size + 1e-6 * max(expected.numel(), 1) ** 0.5)


# ---- making --------------------------------------------------------------------------------------------------


def _made(place: Path, wanted: Wanted, leaves: list[tuple[Any, Tensor]]) -> Package | None:
    """Make a package and keep it. One process does so; others wait for it."""
    paths = [path for path, _ in leaves]
    with leased(place.with_suffix(".lock")):
        meanwhile = _right(_loaded(place, paths), wanted)
        if meanwhile is not None:
            return meanwhile
        tensors = [_plain(tensor) for _, tensor in leaves]
        graph, form = _traced(wanted, tensors)
        seconds = 10 + 0.007 * len(graph.graph.nodes)  # as measured on one core, from LeNet-5 to ResNet-18
        about = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        line = "compiling the %s of this model, which takes about %s; later runs load it at once"
        log.warning(line, wanted.name.replace("_", " "), about, extra=NOTE)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".making-") as scratch:
            output = {"aot_inductor.output_path": str(Path(scratch) / "package.so")}
            with without_compiler_log(), torch.no_grad():
                made = torch._inductor.aot_compile(graph, tuple(tensors), options=OPTIONS | wanted.options | output)
            code = Path(str(made)).read_bytes()
        write_atomically(place.with_suffix(".so"), code)
        told = {"format": FORMAT, "paths": paths, "form": form, "sha256": hashlib.sha256(code).hexdigest()}
        write_atomically(place.with_suffix(".json"), json.dumps(told).encode())
        _prune(place.parent)
        return _right(_loaded(place, paths), wanted)


def _traced(wanted: Wanted, tensors: list[Tensor]) -> tuple[Any, Form]:
    """The graph of the function with flat arguments and results, and the form of the results."""
    from torch.fx.experimental.proxy_tensor import make_fx  # imports the compiler

    forms: list[Form] = []

    def flat(*given: Tensor) -> tuple[Tensor, ...]:
        found = wanted.function(*replaced(wanted.arguments, iter(given)))
        forms.append(form_of(found, wanted.arguments))
        return tuple(tensor for _, tensor in named(found))

    def graph_of(function: Callable[..., Any]) -> Any:
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)

    with torch.no_grad():
        graph = graph_of(flat)
        if wanted.rewritten is not None:
            graph = graph_of(wanted.rewritten(graph))
    constants = [tensor for name, tensor in vars(graph).items() if isinstance(tensor, Tensor)]
    if sum(tensor.nbytes for tensor in constants) > MOST_CONSTANTS:
        raise FedveilError("too much of the model is not trained")
    return graph, forms[0]


def _prune(folder: Path) -> None:
    """Keep the packages that were used last, and nothing that a killed process left half-made."""
    packages = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in packages[MOST_KEPT:]:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
    for left in folder.glob(".making-*"):
        if left.stat().st_mtime < time.time() - 86400:
            shutil.rmtree(left, ignore_errors=True)


def _plain(tensor: Tensor) -> Tensor:
    """In one order in memory, as compiled code is made for strides too, and apart from any gradient."""
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).detach()
