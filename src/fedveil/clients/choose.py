"""Choosing a backend: what a model can run on, and which is fastest for it.

`auto` predicts from counted arithmetic. Nothing is timed and nothing is looked up: a busy machine would choose
otherwise than an idle one, a full cache otherwise than an empty one, and the last bits of a result depend on the
backend. So the same run always makes the same choice.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedveil.clients.compiling import compiler_found
from fedveil.clients.engine import BACKENDS, Backend, Engine, Loss, ResolvedBackend
from fedveil.errors import FedveilError, one_line, unknown_name
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs, as_arguments, count, map_inputs
from fedveil.tree import Tree

log = logging.getLogger("fedveil")

# Compiling takes about ten seconds on two cores and halves the time of small models. From so much work on, in one
# process, the first run takes at most half as long again as uncompiled, and every later one is the faster.
COMPILED_FROM = 15.0
CLEARLY = 1.1  # times faster stacking must be: where both are close, the loop holds less memory
LARGE = 2e9  # operations of a forward pass from which a plain loop keeps a core busy: nothing is to be gained


@dataclass(frozen=True)
class Speed:
    """How fast one core computes."""

    operations_per_second: float
    call_seconds: float  # what every call takes on top


# Measured on one core with small networks: what each operation of a forward pass costs with all that is behind it, once
# for every client (loop) or once for all of them (stacked); and the arithmetic, of which stacked convolutions with
# weights of each client's own make poor use.
LOOP = Speed(4.5e10, 4.5e-5)
STACKED = Speed(3.4e10, 1.5e-4)
STACKED_OWN = Speed(2.2e10, 1.5e-4)
LARGE_LOOP = Speed(1.6e11, 4.5e-5)
EVALUATED = Speed(4.5e10, 1.5e-5)
BACKWARD = 3  # a gradient costs three forward passes
TRIES, TRIED_SECONDS = 6, 0.5  # of a gradient, to see how fast the machine is


@dataclass(frozen=True)
class Counted:
    """What a call consists of."""

    calls: int  # of torch's operations
    operations: int  # floating-point operations in them


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
    processes: int = 1,
    beside: float = 0.0,
) -> Engine:
    """An engine for `steps` steps of `clients` clients, each with a batch like `sample` (one client's batch).

    one_copy: whether the clients take their gradients at the same weights (FedSGD) or each at its own (FedAvg).
    processes: how many such engines share the work.
    beside: predicted seconds of other work that is compiled where gradients are.
    """
    engine = _engine_for(model, loss, clients, perturb)
    work = _Work(sample, clients * steps * processes, one_copy, beside)
    choice = _choose(engine, backend, work)
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
    return _choose(_engine_for(model, loss, clients, perturb), backend, _Work(sample, clients * steps, one_copy))


def _engine_for(model: nn.Module, loss: Loss, clients: int, perturb: str | None) -> Engine:
    engine = Engine(model, loss, backend="stacked", perturb=perturb)
    engine.chunk = min(clients, engine.chunk)
    return engine


@dataclass(frozen=True, eq=False)
class _Work:
    """What an engine is for."""

    sample: tuple[Inputs, Tensor]  # a client's batch
    gradients: int  # of one client each, in all
    one_copy: bool
    beside: float = 0.0  # seconds of other work


def _choose(engine: Engine, backend: Backend, work: _Work) -> Choice:
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    choice = Choice(backend, "as asked") if backend != "auto" else _fastest(engine, work)
    if choice.backend == "loop":
        return choice
    # Stacking is tried out, but for a model that a package was made of: it would import the compiler.
    if choice.backend == "compiled" and engine.keeps_gradient(*_one_step(engine, engine.chunk, work)):
        return choice
    reason = _why_not_stacked(engine, work)
    if reason is None:
        return choice
    if backend != "auto":
        raise FedveilError(f"this model cannot run on the backend '{backend}': {reason}; use --backend loop")
    return Choice("loop", f"the model cannot be stacked: {reason}")


def _fastest(engine: Engine, work: _Work) -> Choice:
    """What is predicted to be fastest."""
    device = work.sample[1].device.type
    if device != "cpu":
        return Choice("stacked", f"a {device} computes for all clients at once")
    try:
        forward = _forward(engine.model, work.sample)
    except Exception as error:  # whatever a foreign module raises: the first step will tell
        return Choice("loop", f"the model does not take this batch: {one_line(error)}")
    if forward.operations >= LARGE:
        return Choice("loop", "a large model keeps the processor busy as it is")
    loop = _gradient(forward, LOOP)
    speed = STACKED if work.one_copy else STACKED_OWN
    stacked = forward.calls * speed.call_seconds / engine.chunk + _gradient(Counted(0, forward.operations), speed)
    seconds = work.gradients * min(loop, stacked) + work.beside
    if seconds >= COMPILED_FROM and compiler_found():
        return Choice("compiled", f"about {seconds:.0f} s of work")
    if stacked * CLEARLY <= loop:
        return Choice("stacked", f"about {loop / stacked:.1f} times as fast as the loop")
    return Choice("loop", f"stacking would take about {stacked / loop:.2f} times as long")


def why_not_stacked(
    model: nn.Module, loss: Loss, sample: tuple[Inputs, Tensor], perturb: str | None = None
) -> str | None:
    """Why a model cannot run stacked, in one line; None if it can."""
    return _why_not_stacked(Engine(model, loss, backend="stacked", perturb=perturb), _Work(sample, 2, one_copy=True))


def keep_gradient(engine: Engine, sample: tuple[Inputs, Tensor], one_copy: bool) -> bool:
    """Make the compiled gradient for such batches now, if it is not kept yet; whether it is kept in the end."""
    return engine.keeps_gradient(*_one_step(engine, engine.chunk, _Work(sample, 1, one_copy)), make=True)


def _why_not_stacked(engine: Engine, work: _Work) -> str | None:
    try:
        engine.gradient(*_one_step(engine, 2, replace(work, one_copy=True)))
    except Exception as error:  # whatever a foreign module raises under vmap is the reason
        return one_line(error)
    return None


def gradient_seconds(model: nn.Module, sample: tuple[Inputs, Tensor], gradients: int) -> float:
    """Estimated seconds for n gradients on one core, from their counted arithmetic: the same on a busy machine."""
    forward = _forward(model, sample)
    return gradients * _gradient(forward, LOOP if forward.operations < LARGE else LARGE_LOOP)


def pace(engine: Engine, sample: tuple[Inputs, Tensor]) -> float:
    """How many times as long as counted this machine takes for a gradient now. For forecasts: choices go by the count.

    The least of a few tries, after one that does not count; in the processor's time, which other programs do not take.
    """
    alone = engine.again("loop")
    step = _one_step(alone, 1, _Work(sample, 1, one_copy=False))
    tries = list[float]()
    while len(tries) < TRIES and sum(tries) < TRIED_SECONDS:
        start, busy = time.perf_counter(), time.process_time()
        alone.gradient(*step)
        tries.append(min(time.perf_counter() - start, time.process_time() - busy))  # several threads: by the clock
    return min(tries[1:] or tries) / gradient_seconds(engine.model, sample, 1)


def evaluation_seconds(model: nn.Module, few: Inputs, examples: int, at_once: int) -> float:
    """Estimated seconds to run a model over so many examples, a batch at once; `few` are some of them."""
    forward = _forward(model, (few, torch.empty(0)))
    each = forward.operations / count(few)
    speed = EVALUATED if each * at_once < LARGE else LARGE_LOOP
    calls = forward.calls * -(-examples // at_once)
    return calls * speed.call_seconds + examples * each / speed.operations_per_second


def _forward(model: nn.Module, sample: tuple[Inputs, Tensor]) -> Counted:
    arguments, keywords = as_arguments(sample[0])
    own = copy.deepcopy(model)  # batch norm would move its statistics
    return counted(lambda: own(*arguments, **keywords))


def _gradient(forward: Counted, speed: Speed) -> float:
    return forward.calls * speed.call_seconds + BACKWARD * forward.operations / speed.operations_per_second


def estimated_seconds(operations_per_call: float, calls: int, speed: Speed) -> float:
    """Estimated seconds for n calls of so many floating-point operations each.

    >>> estimated_seconds(2e7, 1000, Speed(2e10, 5e-4))
    1.5
    """
    return calls * (speed.call_seconds + operations_per_call / speed.operations_per_second)


def counted_operations(call: Callable[[], object]) -> int:
    """The floating-point operations of a call. Torch's generator is left as it was."""
    return counted(call).operations


def counted(call: Callable[[], object]) -> Counted:
    """What a call consists of. Torch's generator is left as it was."""
    counter = _Counter()  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), counter:
        call()
    return Counted(counter.calls, counter.total)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds operations up by torch's formulas. Torch's own counter would import the compiler, which takes seconds."""

    total = 0
    calls = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls += 1
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=found))
        return found


def _one_step(engine: Engine, clients: int, work: _Work) -> tuple[Tree, Tree, Inputs, Tensor, Streams]:
    """The arguments of one gradient step of copies of a sample client."""
    params = {n: p.detach() for n, p in engine.model.named_parameters() if p.requires_grad}
    buffers = {n: b for n, b in engine.model.named_buffers() if n not in engine.key_names}
    inputs = map_inputs(lambda tensor: tensor.expand(clients, *tensor.shape), work.sample[0])
    targets = work.sample[1].expand(clients, *work.sample[1].shape)
    weights = Tree.expand(params, clients)
    if not work.one_copy:
        weights = weights.map(torch.clone)
    streams = Streams.seeded(0, range(clients), "rehearsal")
    return weights, Tree.expand(buffers, clients), inputs, targets, streams
