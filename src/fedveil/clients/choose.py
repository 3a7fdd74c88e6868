"""Choosing a backend: what a model can run on, and which is fastest for it here.

A short calibration times one step on `loop` and on `stacked`. Its times are kept in a small cache file, so that the
same run on the same machine always makes the same choice and gives the same result to the last bit. `compiled` is
chosen only where the time it is estimated to save is well above the time it takes to compile.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedveil.clients.compiling import compiler_found
from fedveil.clients.engine import BACKENDS, Backend, Engine, Loss, ResolvedBackend
from fedveil.errors import FedveilError, one_line, unknown_name
from fedveil.files import write_atomically
from fedveil.streams import Streams
from fedveil.tasks.cache import cache_folder
from fedveil.tasks.inputs import Inputs, as_arguments, map_inputs
from fedveil.tree import Tree

log = logging.getLogger("fedveil")

COMPILE_SECONDS = 30.0  # what compiling one function takes
CLEARLY = 1.1  # times faster stacking must be: where both are close, the loop holds less memory
COMPILED_SAVES = 0.5  # share of the stacked time that compiling saves on small models


@dataclass(frozen=True)
class Speed:
    """How fast one core computes."""

    operations_per_second: float
    call_seconds: float  # what every call takes on top


GRADIENTS = Speed(2e10, 5e-4)  # measured with small networks


@dataclass(frozen=True)
class Choice:
    """The backend for a model and why."""

    backend: ResolvedBackend
    why: str


def make_engine(
    model: nn.Module,
    loss: Loss,
    *,
    backend: Backend = "auto",
    clients: int,
    sample: tuple[Inputs, Tensor],
    steps: int,
    perturb: str | None = None,
    one_copy: bool = True,
) -> Engine:
    """An engine for `steps` steps of `clients` clients, each with a batch like `sample` (one client's batch).

    one_copy: whether the clients take their gradients at the same weights (FedSGD) or each at its own (FedAvg).
    """
    engine = _engine_for(model, loss, clients, perturb)
    choice = _choose(engine, backend, sample, steps * -(-clients // engine.chunk), one_copy)
    log.info("backend %s: %s", choice.backend, choice.why)
    engine.backend = choice.backend
    return engine


def choose_backend(
    model: nn.Module,
    loss: Loss,
    *,
    backend: Backend = "auto",
    clients: int,
    sample: tuple[Inputs, Tensor],
    steps: int,
    perturb: str | None = None,
    one_copy: bool = True,
) -> Choice:
    """Which backend a model should run on, and why; a forced one is checked and taken. Works for any `nn.Module`.

    >>> from torch.nn import functional
    >>> sample = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
    >>> choose_backend(nn.Linear(4, 2), functional.cross_entropy, backend="loop", clients=3, sample=sample, steps=1)
    Choice(backend='loop', why='as asked')
    """
    engine = _engine_for(model, loss, clients, perturb)
    return _choose(engine, backend, sample, steps * -(-clients // engine.chunk), one_copy)


def _engine_for(model: nn.Module, loss: Loss, clients: int, perturb: str | None) -> Engine:
    engine = Engine(model, loss, backend="stacked", perturb=perturb)
    engine.chunk = min(clients, engine.chunk)
    return engine


def _choose(engine: Engine, backend: Backend, sample: tuple[Inputs, Tensor], steps: int, one_copy: bool) -> Choice:
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if backend == "loop":
        return Choice("loop", "as asked")
    reason = _why_not_stacked(engine, sample)
    if reason is not None:
        if backend != "auto":
            raise FedveilError(f"this model cannot run on the backend '{backend}': {reason}; use --backend loop")
        return Choice("loop", f"the model cannot be stacked: {reason}")
    if backend != "auto":
        return Choice(backend, "as asked")
    seconds = _calibrated(engine, sample, one_copy)
    stacked, loop = seconds["stacked"], seconds["loop"]
    saved = min(stacked, loop) * steps * COMPILED_SAVES
    if saved > 2 * COMPILE_SECONDS and compiler_found():
        return Choice("compiled", f"saves about {saved:.0f} s over {steps} steps")
    if stacked * CLEARLY <= loop:
        return Choice("stacked", f"{loop / stacked:.1f} times as fast as the loop")
    return Choice("loop", f"stacking takes {stacked / loop:.2f} times as long")


def why_not_stacked(
    model: nn.Module, loss: Loss, sample: tuple[Inputs, Tensor], perturb: str | None = None
) -> str | None:
    """Why a model cannot run stacked, in one line; None if it can."""
    return _why_not_stacked(Engine(model, loss, backend="stacked", perturb=perturb), sample)


def _why_not_stacked(engine: Engine, sample: tuple[Inputs, Tensor]) -> str | None:
    try:
        _one_step(engine, 2, sample)
    except Exception as error:  # whatever a foreign module raises under vmap is the reason
        return one_line(error)
    return None


def _calibrated(engine: Engine, sample: tuple[Inputs, Tensor], one_copy: bool) -> dict[str, float]:
    """Seconds of one step of a chunk on `loop` and `stacked`, from the cache or else measured and kept there."""
    key = _key(engine, sample, one_copy)
    path = cache_folder() / "calibration.json"
    known = _read(path)
    if key not in known:
        backends: tuple[ResolvedBackend, ...] = ("loop", "stacked")
        found: dict[str, list[float]] = {backend: [] for backend in backends}
        for _ in range(5):  # in turns, as a machine's speed drifts
            for engine.backend in backends:
                found[engine.backend].append(_one_step(engine, engine.chunk, sample, one_copy))
        known[key] = {backend: min(times[1:]) for backend, times in found.items()}  # the first pays for set-up
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(known, indent=1).encode())
        except (OSError, FedveilError) as error:
            log.info("the calibration is not kept: %s", error)
    return known[key]


def gradient_seconds(model: nn.Module, sample: tuple[Inputs, Tensor], gradients: int) -> float:
    """Estimated seconds for n gradients on one core, from their counted arithmetic: the same on a busy machine."""
    arguments, keywords = as_arguments(sample[0])
    own = copy.deepcopy(model)  # batch norm would move its statistics
    return estimated_seconds(3 * counted_operations(lambda: own(*arguments, **keywords)), gradients)


def estimated_seconds(operations_per_call: float, calls: int, speed: Speed = GRADIENTS) -> float:
    """Estimated seconds for n calls of so many floating-point operations each.

    >>> estimated_seconds(2e7, 1000)
    1.5
    """
    return calls * (speed.call_seconds + operations_per_call / speed.operations_per_second)


def counted_operations(call: Callable[[], object]) -> int:
    """The floating-point operations of a call. Torch's generator is left as it was."""
    counter = _Counter()  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), counter:
        call()
    return counter.total


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds operations up by torch's formulas. Torch's own counter would import the compiler, which takes seconds."""

    total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=found))
        return found


def _one_step(engine: Engine, clients: int, sample: tuple[Inputs, Tensor], one_copy: bool = True) -> float:
    """The seconds of one gradient step of copies of a sample client."""
    params = {n: p.detach() for n, p in engine.model.named_parameters() if p.requires_grad}
    buffers = {n: b for n, b in engine.model.named_buffers() if n not in engine.key_names}
    inputs = map_inputs(lambda tensor: tensor.expand(clients, *tensor.shape), sample[0])
    targets = sample[1].expand(clients, *sample[1].shape)
    streams = Streams.seeded(0, range(clients), "calibration")
    weights = Tree.expand(params, clients)
    if not one_copy:
        weights = weights.map(torch.clone)
    start = time.perf_counter()
    engine.gradient(weights, Tree.expand(buffers, clients), inputs, targets, streams)
    return time.perf_counter() - start


def _key(engine: Engine, sample: tuple[Inputs, Tensor], one_copy: bool) -> str:
    shapes = [tuple(p.shape) for p in engine.model.parameters()]
    inputs = sample[0].shape if isinstance(sample[0], Tensor) else {n: t.shape for n, t in sample[0].items()}
    machine = (platform.processor(), platform.machine(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    text = repr((str(engine.model), shapes, engine.chunk, one_copy, inputs, sample[1].shape, machine))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _read(path: Path) -> dict[str, dict[str, float]]:
    """What was measured before; a missing or damaged file counts as nothing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {k: {b: float(v[b]) for b in ("loop", "stacked")} for k, v in content.items()}
        return {k: times for k, times in found.items() if all(0 < each < math.inf for each in times.values())}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return {}
