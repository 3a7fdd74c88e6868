"""The one place that computes gradients on the client axis, with three backends that give the same answer.

`loop` runs any `nn.Module` one client after another with plain autograd. `stacked` runs all clients of a chunk at
once through `torch.func.vmap`. `compiled` compiles that with a fixed number of clients: the last chunk is filled
with whole dummy clients, so one graph serves any number of clients; the code is kept for later runs (`packages`).
Examples are never padded: under batch norm that would change the answer. What is computed is a `Quantity`; how one
client goes through the model, `Passes` knows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedveil.clients.compiling import compile_once, compiler_found
from fedveil.clients.draws import DrawWatch
from fedveil.clients.dropout import KeyedDropout, keyed_for_a_while
from fedveil.clients.graph import NotUnderstood
from fedveil.clients.identity import code_of, identity
from fedveil.clients.nested import map_nested, pad_clients, shapes_behind, zip_nested
from fedveil.clients.packages import Package, Wanted, packaged
from fedveil.clients.passes import Loss as Loss  # re-exported
from fedveil.clients.passes import OneClient, Passes
from fedveil.clients.passes import Tensors as Tensors  # re-exported
from fedveil.clients.per_example import ClippedSum
from fedveil.clients.quantities import (
    ExampleGradients,
    Features,
    Gradient,
    InputGradient,
    LocalSensitivity,
    MeanLoss,
    Quantity,
    Sensitivity,
)
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs, as_arguments, take
from fedveil.tree import Tree, size_in_bytes

Backend = Literal["auto", "loop", "stacked", "compiled"]
ResolvedBackend = Literal["loop", "stacked", "compiled"]  # what "auto" comes to
BACKENDS: tuple[Backend, ...] = ("auto", "loop", "stacked", "compiled")

# Stacked gradients that outgrow the processor's cache cost more than stacking saves.
CACHE_BYTES = 8 * 2**20
MOST_STACKED = 32


class Gradients(NamedTuple):
    """What a gradient computation yields on the client axis."""

    update: Tree
    buffers: Tree  # as the forward pass left them
    loss: Tensor  # (K,)


class Engine(Passes):
    """Gradients of one model and loss for many clients at once.

    `perturb` names the leaf of the inputs that input gradients are taken of (None: the inputs are one tensor).
    `chunk` bounds how many clients are stacked at a time; by default it is sized by the processor's cache. `own` runs
    the module itself and not a copy of it (on the loop): what its owner changes in it counts from the next `look` on,
    and after every pass it is as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        backend: Backend = "stacked",
        chunk: int | None = None,
        perturb: str | None = None,
        own: bool = False,
    ) -> None:
        if backend == "auto" or backend not in BACKENDS:
            raise FedveilError(f"an engine runs on loop, stacked or compiled, not on '{backend}'")
        if own and backend != "loop":
            raise FedveilError(f"only the backend loop runs a module itself, not '{backend}'")
        super().__init__(model, loss, perturb=perturb, own=own)
        self.backend: ResolvedBackend = backend
        size = size_in_bytes(self.model.parameters())
        self.chunk = chunk or max(1, min(MOST_STACKED, CACHE_BYTES // max(size, 1)))
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._compiled_shapes: dict[tuple[Quantity, bool], tuple[Any, ...]] = {}
        self._watch = DrawWatch()

    def again(self, backend: ResolvedBackend | None = None, chunk: int | None = None) -> Engine:
        """This engine for another run, maybe on another backend: what was compiled serves both.

        Which shape of batches is compiled for, a run's first batch decides. So what ran before does not change a bit.
        """
        other = copy.copy(self)
        other.backend, other.chunk = backend or self.backend, chunk or self.chunk
        other._compiled_shapes = {}
        return other

    def uncompiled(self) -> Engine:
        """This engine for a few steps, which are not worth compiling for."""
        return self.again("loop" if self.backend == "loop" else "stacked")

    # ---- what callers use ----------------------------------------------------------------------------

    def gradient(self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams) -> Gradients:
        """Each client's gradient of its mean loss, with the moved buffers and the losses."""
        update, loss, moved = self._run(Gradient(), params, buffers, inputs, targets, streams)
        return Gradients(_tree(update), _tree(moved), loss)

    def gradient_at_home(self, inputs: Inputs, targets: Tensor) -> Gradients | None:
        """`gradient` of one client's batch by the module itself, as it stands, without a client axis on the way in.

        This takes the overhead off a step of a small model, where it would be a fifth. None where a pass needs more
        than that: dropout from a stream, buffers that may move, or modes of the layers in which draws are not ruled
        out yet.
        """
        parts = self.parts
        if not self.own or parts.dropouts or parts.buffers or not self._watch.quiet(self._modes()):
            return None
        before = torch.get_rng_state()
        arguments, keywords = as_arguments(inputs)
        with torch.enable_grad():
            with self.precision():
                loss = self.loss_function(self.model(*arguments, **keywords), targets)
            update = self.gradients(loss, dict(parts.trained))
        if not torch.equal(before, torch.get_rng_state()):
            return None
        return Gradients(Tree.expand(update, 1), Tree({}), loss.detach().unsqueeze(0))

    def input_gradient(
        self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams
    ) -> tuple[Tensor, Tensor]:
        """The gradient of each client's loss in the perturbed leaf of its inputs, and the losses."""
        gradient, loss = self._run(InputGradient(), params, buffers, inputs, targets, streams)
        return gradient, loss

    def example_gradients(self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams) -> Tree:
        """The gradient of every single example: tensors of shape (K, B, ...)."""
        self._require_apart()
        return _tree(self._run(ExampleGradients(), params, buffers, inputs, targets, streams))

    def clipped_sum(
        self, bound: float, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams
    ) -> tuple[Tree, Tensor]:
        """The sum of every client's example gradients, each scaled down to a norm of `bound`, and the mean losses.

        One client at a time, whatever the backend: that takes one pass of a whole batch. See `clients/per_example.py`.
        """
        self._require_apart()
        looping = self if self.backend == "loop" else self.again("loop")
        total, loss = looping._run(ClippedSum(bound), params, buffers, inputs, targets, streams)
        return _tree(total), loss

    def loss(self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams) -> Tensor:
        """Each client's mean loss: shape (K,)."""
        return self._run(MeanLoss(), params, buffers, inputs, targets, streams)  # type: ignore[no-any-return]

    def evaluation_loss(self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams) -> Tensor:
        """Each client's mean loss with the model in evaluation mode: shape (K,)."""
        training = [module for module in self.model.modules() if module.training]
        try:
            self.model.eval()
            found: Tensor = self._run(MeanLoss(training=False), params, buffers, inputs, targets, streams)
            return found
        finally:
            for module in training:
                module.training = True

    def features(
        self, layer: str, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams
    ) -> Tensor:
        """The output of a named layer: shape (K, B, ...)."""
        self._require(layer)
        return self._run(Features(layer), params, buffers, inputs, targets, streams)  # type: ignore[no-any-return]

    def sensitivity(
        self, layer: str, chosen: Tensor, params: Tree, buffers: Tree, inputs: Inputs, streams: Streams
    ) -> tuple[Tensor, Tensor]:
        """Some features r_i that a named layer takes in, and the norms ‖∂r_i/∂x‖: both of shape (K, B, m).

        `chosen` has m features of each client: shape (K, m). One backward pass each serves a whole batch: where
        examples mix (batch norm), an example's share in the features of others counts too.
        """
        self._require(layer)
        arguments = params, buffers, inputs, chosen, streams
        try:
            looping = self if self.backend == "loop" else self.again("loop")
            return looping._run(LocalSensitivity(layer), *arguments)  # type: ignore[no-any-return]
        except NotUnderstood:
            return self._run(Sensitivity(layer), *arguments)  # type: ignore[no-any-return]

    def _require_apart(self) -> None:
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in self.model.modules()):
            raise FedveilError(
                "per-example gradients do not exist under batch norm, which mixes the examples of a batch: "
                "use a model with group norm (resnet18:norm=group) or none"
            )

    def _require(self, layer: str) -> None:
        if layer not in dict(self.model.named_modules()):
            raise FedveilError(f"the model has no layer '{layer}'")

    def loss_of_one(self, params: Tensors, buffers: Tensors, inputs: Inputs, targets: Tensor) -> Tensor:
        """One client's loss as a pure function that `grad`, `vmap` and autograd can go through; no dropout keys."""
        return self.loss_and_buffers(params, buffers, {}, inputs, targets)[0]

    # ---- running on the client axis --------------------------------------------------------------------

    def _run(
        self, quantity: Quantity, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams
    ) -> Any:
        if self.own:
            with keyed_for_a_while(self.parts.dropouts) as self._stand_ins:
                keys = {name: streams.fold(name).key64().to(targets.device) for name in self._stand_ins}
                return self._looped(quantity, _Stacked(params, buffers, keys, inputs, targets), streams)
        stacked = _Stacked(params, buffers, self._keys(targets, streams), inputs, targets)
        if self.backend == "loop":
            return self._looped(quantity, stacked, streams)
        # A single client's weights are one copy too; only where a graph for several copies exists is that one used.
        one_copy = params.repeated or (len(targets) == 1 and (quantity, False) not in self._compiled_shapes)
        arguments, parts = stacked.plain(), []
        if len(targets) <= self.chunk:
            return self._chunk(quantity, one_copy, arguments)
        for start in range(0, len(targets), self.chunk):
            part = map_nested(lambda t, start=start: t[start : start + self.chunk], arguments)  # type: ignore[misc]
            parts.append(self._chunk(quantity, one_copy, part))
        return zip_nested(torch.cat, parts)

    def _keys(self, targets: Tensor, streams: Streams) -> Tensors:
        """A key for each dropout layer and client; zeros where none is in training mode."""
        if self.key_names and any(isinstance(m, KeyedDropout) and m.training for m in self.model.modules()):
            return {name: streams.fold(name).key64().to(targets.device) for name in self.key_names}
        return {name: targets.new_zeros(len(targets), dtype=torch.int64) for name in self.key_names}

    def _looped(self, quantity: Quantity, stacked: _Stacked, streams: Streams) -> Any:
        """One client after another."""
        clients = stacked.apart()
        try:
            with torch.enable_grad():
                return self._watch.run(
                    self._modes(), [partial(self._alone, quantity, client) for client in clients], streams
                )
        finally:
            self.take_back()

    def _modes(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self.parts.modules.values()])

    def _alone(self, quantity: Quantity, client: OneClient) -> Any:
        return quantity.plain(self, OneClient(self.lend(client.params), *client[1:]))

    def _chunk(self, quantity: Quantity, one_copy: bool, arguments: tuple[Any, ...]) -> Any:
        """One chunk of clients, through the compiled function where its shapes are those it was compiled for."""
        count = len(arguments[4])
        if one_copy:  # cheaper than K equal ones
            arguments = ({name: tensor[0] for name, tensor in arguments[0].items()}, *arguments[1:])
        if self.backend == "compiled" and quantity.compiles:
            shapes = shapes_behind(arguments[3:])
            # A ragged last batch is rare: it is not worth half a minute of compiling, and runs stacked.
            if self._compiled_shapes.setdefault((quantity, one_copy), shapes) == shapes and compiler_found():
                weights = arguments[0] if one_copy else pad_clients(arguments[0], self.chunk)
                padded = (weights, *pad_clients(arguments[1:], self.chunk))
                result = self._compiled(quantity, one_copy, padded)(*padded)
                return map_nested(lambda tensor: tensor[:count], result) if count < self.chunk else result
        return self._stacked(quantity, one_copy)(*arguments)

    def _stacked(self, quantity: Quantity, one_copy: bool) -> Callable[..., Any]:
        """The function of a quantity on the client axis."""
        key = (quantity, one_copy)
        if key not in self._functions:

            def pure(*arguments: Any) -> Any:
                return quantity.pure(self, OneClient(*arguments))

            self._functions[key] = vmap(pure, in_dims=(None if one_copy else 0, 0, 0, 0, 0), randomness="error")
        return self._functions[key]

    def _compiled(self, quantity: Quantity, one_copy: bool, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """The same compiled, for a number of clients, shapes behind it, and the layers' modes: a package, if it can be.

        What was compiled by `torch.compile` in this process is not kept.
        """
        key = (quantity, one_copy, self.chunk, shapes_behind(arguments[3:]), self._modes())
        if key not in self._functions:
            made = packaged(self._wanted(quantity, one_copy, arguments))
            self._functions[key] = made or compile_once(self._stacked(quantity, one_copy), quantity.name)
        return self._functions[key]

    def keeps_gradient(
        self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams, *, make: bool = False
    ) -> bool:
        """Whether there is a package for gradients of such arguments of a whole chunk; `make` one if there is none."""
        stacked = _Stacked(params, buffers, self._keys(targets, streams), inputs, targets).plain()
        arguments = pad_clients(map_nested(lambda tensor: tensor[: self.chunk], stacked), self.chunk)
        one_copy = params.repeated or len(targets) == 1
        if one_copy:
            arguments = ({name: tensor[0] for name, tensor in arguments[0].items()}, *arguments[1:])
        key = (Gradient(), one_copy, self.chunk, shapes_behind(arguments[3:]), self._modes())
        if key not in self._functions:
            found = packaged(self._wanted(Gradient(), one_copy, arguments), make=make)
            if found is None:
                return False
            self._functions[key] = found
        return isinstance(self._functions[key], Package)

    def _wanted(self, quantity: Quantity, one_copy: bool, arguments: tuple[Any, ...]) -> Wanted:
        given = {**self.parts.buffers, **{n: p for n, p in self.parts.parameters.items() if p.requires_grad}}
        settings = [code_of("fedveil.clients"), quantity, one_copy, self.model, self.loss_function, self.perturb]
        return Wanted(
            name=quantity.name,
            function=self._stacked(quantity, one_copy),
            arguments=arguments,
            identity=identity(settings, given),
            expected=lambda: self._one_by_one(quantity, one_copy, arguments),
        )

    def _one_by_one(self, quantity: Quantity, one_copy: bool, arguments: tuple[Any, ...]) -> Any:
        """What `stacked` gives, by plain autograd."""
        weights, *rest = arguments
        found = []
        try:
            with torch.enable_grad():
                for k in range(self.chunk):
                    own = map_nested(lambda tensor, k=k: tensor[k], tuple(rest))  # type: ignore[misc]
                    params = weights if one_copy else {name: tensor[k] for name, tensor in weights.items()}
                    found.append(self._alone(quantity, OneClient(params, *own)))
        finally:
            self.take_back()
        return zip_nested(torch.stack, found)


def _tree(tensors: Mapping[str, Tensor]) -> Tree:
    return tensors if isinstance(tensors, Tree) else Tree(tensors)


class _Stacked(NamedTuple):
    """What a computation starts from: every tensor's first axis is the client."""

    params: Tree
    buffers: Tree
    keys: Tensors
    inputs: Inputs
    targets: Tensor

    def plain(self) -> tuple[Tensors, Tensors, Tensors, Inputs, Tensor]:
        """The same in dicts of Python's own, which `vmap` takes; a tokenizer's mapping is none."""
        inputs = self.inputs if isinstance(self.inputs, Tensor) else dict(self.inputs)
        return dict(self.params), dict(self.buffers), self.keys, inputs, self.targets

    def apart(self) -> list[OneClient]:
        """The clients one by one. Where all have one copy of the weights, it is the same object."""
        count = len(self.targets)
        weights = [self.params.row(0)] * count if self.params.repeated else [self.params.row(k) for k in range(count)]
        return [
            OneClient(
                weights[k],
                self.buffers.row(k),
                {name: key[k] for name, key in self.keys.items()},
                take(self.inputs, k),
                self.targets[k],
            )
            for k in range(count)
        ]
