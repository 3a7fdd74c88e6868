"""What a model draws by itself, such as functional dropout: from the client's stream, not from torch's own generator.

Torch's own generator belongs to the whole process. To set it, run a model and set it back would give other threads
the same numbers twice. Here every operation that draws gets a generator of the client's instead, and the process's own
is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fedveil.clients.nested import stack
from fedveil.errors import FedveilError
from fedveil.streams import TWISTER_WORDS, Streams, twister_state


class OwnDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, what this thread draws without a generator comes from one client's stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would else import its whole compiler, which takes seconds; nothing here is compiled

    @property
    def drew(self) -> bool:
        """Whether anything was drawn."""
        return bool(self._generators)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawing = drawing_operation(func)
        given = any(isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values()))
        if drawing is None or given:
            return func(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:
            raise repeated_pass()
        first = next((argument for argument in args if isinstance(argument, Tensor)), None)
        device = first.device if first is not None else torch.device(kwargs.get("device") or "cpu")
        generator = self._generator(device)
        if func is torch.ops.aten.native_dropout.default:
            return _native_dropout(*args, generator=generator)
        names = [argument.name for argument in drawing._schema.arguments]
        position = names.index("generator")
        return drawing(*args[:position], *args[position + 1 :], **{**kwargs, "generator": generator})

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            # Filling a generator costs as much as a small gradient: only a model that draws gets one.
            generator = torch.Generator(device)
            if device.type == "cpu":
                generator.set_state(generator_state(self._streams))
            else:
                generator.manual_seed(int(self._streams.fold(str(device)).key64()))
            self._generators[device] = generator
        return self._generators[device]


@cache
def drawing_operation(func: OpOverload) -> OpOverload | None:
    """The form of an operation that takes a generator; None where the operation draws nothing or has no such form."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    own = [argument.name for argument in func._schema.arguments]
    if "generator" in own or func is torch.ops.aten.native_dropout.default:
        return func
    for name in func.overloadpacket.overloads():
        other: OpOverload = getattr(func.overloadpacket, name)
        names = [argument.name for argument in other._schema.arguments]
        if "generator" in names and [each for each in names if each != "generator"] == own:
            return other
    return None


def _native_dropout(
    inputs: Tensor, p: float, train: bool | None = True, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The one operation of those that models use which takes no generator."""
    if train is False or p == 0:
        return inputs.clone(), torch.ones_like(inputs, dtype=torch.bool)
    mask = torch.empty_like(inputs).bernoulli_(1 - p, generator=generator)
    return inputs * mask / (1 - p) if p < 1 else inputs * mask, mask.bool()


def generator_state(streams: Streams) -> Tensor:
    """A whole state for torch's generator from the client's stream: its seed alone would keep 32 bits."""
    return twister_state(streams.integers(2**32, TWISTER_WORDS)[0].numpy())


def repeated_pass() -> FedveilError:
    """What is raised where a forward pass is repeated inside a backward pass: it would draw other numbers."""
    return FedveilError(
        "the model draws random numbers in its backward pass, as activation checkpointing does, and they would not be "
        "those of the forward pass: turn checkpointing off, or dropout inside it"
    )


class DrawWatch:
    """Runs a model for some clients so that whatever it draws by itself comes from their streams.

    Watching operations costs a few microseconds each. It is done the first time that the model runs with its layers in
    some modes, and always for a model that has drawn before. Else torch's own generator is compared before and after;
    if it moved, the model drew after all, or another thread did, and the pass is done again.
    """

    def __init__(self) -> None:
        self._quiet: set[Hashable] = set()  # modes in which the model drew nothing
        self._always = False

    def quiet(self, modes: Hashable) -> bool:
        """Whether the model is known to draw nothing in these modes."""
        return not self._always and modes in self._quiet

    def run(self, modes: Hashable, calls: Sequence[Callable[[], Any]], streams: Streams) -> Any:
        """What one call for each client returns, stacked."""
        if self.quiet(modes):
            before = torch.get_rng_state()
            found = stack(call() for call in calls)
            if torch.equal(before, torch.get_rng_state()):
                return found
            self._always = True
        drew = False
        results = []
        for client, call in enumerate(calls):
            with OwnDraws(streams.rows([client]).fold("torch")) as own:
                results.append(call())
            drew |= own.drew
        if drew:
            self._always = True
        self._quiet.add(modes)
        return stack(results)
