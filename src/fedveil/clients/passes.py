"""One client's passes through the model, as pure functions and with plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.clients.dropout import DROPOUTS, KeyedDropout, with_keyed_dropout
from fedveil.tasks.inputs import Inputs, as_arguments, with_leaf

Loss = Callable[[Any, Tensor], Tensor]  # (model output, targets) -> mean loss of the batch
Tensors = dict[str, Tensor]  # one client's tensors


class OneClient(NamedTuple):
    """What a client's passes start from; no tensor has a client axis."""

    params: Tensors
    buffers: Tensors
    keys: Tensors  # of the dropout layers
    inputs: Inputs
    targets: Tensor


@dataclass(frozen=True, eq=False)
class Parts:
    """What a module consists of, by name. To walk through a module takes a while: do it once in a step."""

    modules: dict[str, nn.Module]
    dropouts: dict[str, nn.Module]  # those of them that draw
    parameters: dict[str, nn.Parameter]
    trained: dict[str, nn.Parameter]  # those of them that are
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """What it consists of now: its owner may change that at any time."""
        modules = _modules(model, "", {}, set())
        parameters = _without_repeats(modules, "_parameters")
        return cls(
            modules,
            {name: module for name, module in modules.items() if type(module) in DROPOUTS},
            parameters,
            {name: parameter for name, parameter in parameters.items() if parameter.requires_grad},
            _without_repeats(modules, "_buffers"),
        )

    @cached_property
    def weights(self) -> Tensors:
        """The values of the trained parameters."""
        return {name: parameter.detach() for name, parameter in self.trained.items()}


def _modules(module: nn.Module, name: str, found: dict[str, nn.Module], seen: set[int]) -> dict[str, nn.Module]:
    """As `named_modules` finds them, which is a generator in a generator for every level and four times as slow."""
    if id(module) not in seen:
        seen.add(id(module))
        found[name] = module
        for short, inner in module._modules.items():
            if inner is not None:
                _modules(inner, f"{name}.{short}" if name else short, found, seen)
    return found


def _without_repeats(modules: dict[str, nn.Module], kind: str) -> dict[str, Any]:
    """The tensors of a kind, each under its first name, as torch's `named_parameters` and `named_buffers` do it."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for module_name, module in modules.items():
        for short, tensor in getattr(module, kind).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{module_name}.{short}" if module_name else short] = tensor
    return found


class Passes:
    """A model and its loss, run with the weights of one client at a time.

    `perturb` names the leaf of the inputs that input gradients are taken of (None: the inputs are one tensor). `own`
    runs the module itself and not a copy of it: what its owner changes in it counts from the next `look` on.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, perturb: str | None = None, own: bool = False) -> None:
        self.model, self.key_names = (model, []) if own else with_keyed_dropout(model)
        self.own = own
        self.loss_function = loss
        self.perturb = perturb
        # With plain autograd: what the forward pass and the loss run in (autocast), and what the loss is multiplied by
        # on the way back (half precision would lose small gradients). Results are not scaled.
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.loss_scale = 1.0
        self._stand_ins: dict[str, KeyedDropout] = {}  # for the dropout layers of a module that is run itself, by key
        self._lender: Tensors | None = None
        self._lent: Tensors | None = None
        self._own_values: Tensors = {}  # what was in the model's parameters before weights were lent to it
        self.parts = Parts.of(self.model)
        # How the graphs of this model are read, by their signatures; None: not at all. See `clients/per_example.py`.
        self.graphs: dict[Hashable, tuple[bool, ...] | None] = {}

    def look(self) -> Parts:
        """What the model consists of now, for all passes until the next look."""
        self.parts = Parts.of(self.model)
        return self.parts

    # ---- pure functions --------------------------------------------------------------------------------

    def forward(self, params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs) -> tuple[Any, Tensors]:
        """The model's output and its moved buffers; nothing that is passed in changes."""
        moved = {name: buffer.clone() for name, buffer in buffers.items()}
        state = {**moved, **{name: key.clone() for name, key in keys.items()}}
        arguments, keywords = as_arguments(inputs)
        if params is self._lent:
            self._put_buffers(state)
            return self.model(*arguments, **keywords), moved
        return functional_call(self.model, (params, state), arguments, keywords), moved

    def loss_and_buffers(
        self, params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs, targets: Tensor
    ) -> tuple[Tensor, Tensors]:
        """A client's loss and the buffers that its forward pass moved."""
        output, moved = self.forward(params, buffers, keys, inputs)
        return self.loss_function(output, targets), moved

    def loss_at(self, value: Tensor, client: OneClient) -> Tensor:
        """A client's loss as a function of the perturbed leaf of its inputs."""
        return self.loss_and_buffers(*self.moved_to(value, client))[0]

    def moved_to(self, value: Tensor, client: OneClient) -> OneClient:
        """The client with another value of that leaf."""
        return client._replace(inputs=with_leaf(client.inputs, self.perturb, value))

    # ---- plain autograd, for any module ----------------------------------------------------------------

    def lend(self, params: Tensors) -> Tensors:
        """The model's own parameters with one client's weights in them, not copied, until `take_back`.

        A model called with its own parameters costs nothing on top, where `functional_call` would cost as much as a
        small layer.
        """
        if params is self._lender and self._lent is not None:
            return self._lent
        parameters, at_home = self.parts.parameters, self.parts.weights
        if len(params) == len(at_home) and all(map(is_, params.values(), at_home.values())):
            self._lender, self._lent = params, {name: parameters[name] for name in params}  # there they are already
            return self._lent
        if not self._own_values:
            self._own_values = {name: parameters[name].data for name in params}
        self._lender, self._lent = params, {name: parameters[name] for name in params}
        for own, tensor in zip(self._lent.values(), params.values(), strict=True):
            own.data = tensor
            if not own.requires_grad:
                own.requires_grad_()
        return self._lent

    def take_back(self) -> None:
        """Leave the model as it was."""
        for name, tensor in self._own_values.items():
            self.parts.parameters[name].data = tensor
        self._put_buffers(self.parts.buffers)
        self._lender = self._lent = None
        self._own_values = {}

    def _put_buffers(self, buffers: Tensors) -> None:
        for name, buffer in buffers.items():
            module, _, short = name.rpartition(".")
            (self._stand_ins.get(name) or self.parts.modules[module])._buffers[short] = buffer

    def in_precision(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function gives inside of `precision`."""
        with self.precision():
            return function(*arguments)

    def gradients(self, loss: Tensor, params: Tensors) -> Tensors:
        """The gradient of a loss in every parameter; zeros for one that the loss does not touch."""
        scale = self.loss_scale
        start = None if scale == 1 else torch.full_like(loss, scale)
        found = torch.autograd.grad(loss, list(params.values()), start, allow_unused=True)
        dense = [None if g is None else g.to_dense() if g.is_sparse else g for g in found]
        pairs = zip(params.items(), dense, strict=True)
        return {n: torch.zeros_like(p) if g is None else g if start is None else g / scale for (n, p), g in pairs}
