"""The one place that computes gradients on the client axis, with three backends that give the same answer.

`loop` runs any `nn.Module` one client after another with plain autograd. `stacked` runs all clients of a chunk at
once through `torch.func.vmap`. `compiled` compiles that with a fixed number of clients: the last chunk is filled
with whole dummy clients, so one graph serves any number of clients. Examples are never padded: under batch norm
that would change the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vjp, vmap
from torch.utils.hooks import RemovableHandle

from fedveil.clients.compiling import compile_once, compiler_found
from fedveil.clients.draws import DrawWatch
from fedveil.clients.dropout import KeyedDropout, example_key, keyed_for_a_while, with_keyed_dropout
from fedveil.clients.nested import map_nested, pad_clients, shapes_behind, zip_nested
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs, as_arguments, leaf, map_inputs, take, with_leaf
from fedveil.tree import Tree, size_in_bytes

Backend = Literal["auto", "loop", "stacked", "compiled"]
ResolvedBackend = Literal["loop", "stacked", "compiled"]  # what "auto" comes to
BACKENDS: tuple[Backend, ...] = ("auto", "loop", "stacked", "compiled")
Loss = Callable[[Any, Tensor], Tensor]  # (model output, targets) -> mean loss of the batch
Tensors = dict[str, Tensor]  # one client's tensors

# Stacked gradients that outgrow the processor's cache cost more than stacking saves.
CACHE_BYTES = 8 * 2**20
MOST_STACKED = 32
FEATURES_AT_ONCE = 8  # backward passes that `sensitivity` stacks: more would cost memory and save little


class Gradients(NamedTuple):
    """What a gradient computation yields on the client axis."""

    update: Tree
    buffers: Tree  # as the forward pass left them
    loss: Tensor  # (K,)


class Engine:
    """Gradients of one model and loss for many clients at once.

    `perturb` names the leaf of the inputs that input gradients are taken of (None: the inputs are one tensor).
    `chunk` bounds how many clients are stacked at a time; by default it is sized by the processor's cache. `own` runs
    the module itself and not a copy of it (on the loop): what its owner changes in it counts at once, and after every
    pass it is as it was.
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
        self.model, self.key_names = (model, []) if own else with_keyed_dropout(model)
        self.own = own
        self._own = dict(self.model.named_parameters())
        self._own_values: Tensors = {}  # what was in them while they are lent
        self._own_buffers = dict(self.model.named_buffers())
        self._stand_ins: dict[str, KeyedDropout] = {}  # for the dropout layers of a module that is run itself, by key
        self.loss_function = loss
        # How a pass goes on the loop: what the forward pass and the loss run in (autocast), and what the loss is
        # multiplied by on the way back (half precision would lose small gradients). Results are not scaled.
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.loss_scale = 1.0
        self.backend: ResolvedBackend = backend
        self.perturb = perturb
        size = size_in_bytes(self.model.parameters())
        self.chunk = chunk or max(1, min(MOST_STACKED, CACHE_BYTES // max(size, 1)))
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._compiled_shapes: dict[tuple[str, bool], tuple[Any, ...]] = {}
        self._lender: Tensors | None = None
        self._lent: Tensors | None = None
        self._watch = DrawWatch()

    # ---- what callers use ----------------------------------------------------------------------------

    def gradient(self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams) -> Gradients:
        """Each client's gradient of its mean loss, with the moved buffers and the losses."""
        update, loss, moved = self._run("gradient", params, buffers, inputs, targets, streams)
        return Gradients(Tree(update), Tree(moved), loss)

    def input_gradient(
        self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams
    ) -> tuple[Tensor, Tensor]:
        """The gradient of each client's loss in the perturbed leaf of its inputs, and the losses."""
        gradient, loss = self._run("input_gradient", params, buffers, inputs, targets, streams)
        return gradient, loss

    def example_gradients(self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams) -> Tree:
        """The gradient of every single example: tensors of shape (K, B, ...)."""
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in self.model.modules()):
            raise FedveilError(
                "per-example gradients do not exist under batch norm, which mixes the examples of a batch: "
                "use a model with group norm (resnet18:norm=group) or none"
            )
        return Tree(self._run("example_gradients", params, buffers, inputs, targets, streams))

    def loss(self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams) -> Tensor:
        """Each client's mean loss: shape (K,)."""
        return self._run("loss", params, buffers, inputs, targets, streams)  # type: ignore[no-any-return]

    def evaluation_loss(self, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams) -> Tensor:
        """Each client's mean loss with the model in evaluation mode: shape (K,)."""
        training = [module for module in self.model.modules() if module.training]
        try:
            self.model.eval()
            # A kind of its own: what was compiled for one mode must not serve the other.
            return self._run("evaluation loss", params, buffers, inputs, targets, streams)  # type: ignore[no-any-return]
        finally:
            for module in training:
                module.training = True

    def features(
        self, layer: str, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams
    ) -> Tensor:
        """The output of a named layer: shape (K, B, ...)."""
        self._require(layer)
        return self._run(f"features {layer}", params, buffers, inputs, targets, streams)  # type: ignore[no-any-return]

    def sensitivity(
        self, layer: str, chosen: Tensor, params: Tree, buffers: Tree, inputs: Inputs, streams: Streams
    ) -> tuple[Tensor, Tensor]:
        """Some features r_i that a named layer takes in, and the norms ‖∂r_i/∂x‖: both of shape (K, B, m).

        `chosen` has m features of each client: shape (K, m). One backward pass each serves a whole batch: where
        examples mix (batch norm), an example's share in the features of others counts too.
        """
        self._require(layer)
        # There is no loss, so no targets: the chosen features go in their place.
        return self._run(f"sensitivity {layer}", params, buffers, inputs, chosen, streams)  # type: ignore[no-any-return]

    def _require(self, layer: str) -> None:
        if layer not in dict(self.model.named_modules()):
            raise FedveilError(f"the model has no layer '{layer}'")

    def loss_of_one(self, params: Tensors, buffers: Tensors, inputs: Inputs, targets: Tensor) -> Tensor:
        """One client's loss as a pure function that `grad`, `vmap` and autograd can go through; no dropout keys."""
        return self._loss(params, buffers, {}, inputs, targets)[0]

    # ---- pure functions of one client ----------------------------------------------------------------

    def _forward(self, params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs) -> tuple[Any, Tensors]:
        """The model's output and its moved buffers; nothing that is passed in changes."""
        moved = {name: buffer.clone() for name, buffer in buffers.items()}
        state = {**moved, **{name: key.clone() for name, key in keys.items()}}
        arguments, keywords = as_arguments(inputs)
        if params is self._lent:
            self._put_buffers(state)
            return self.model(*arguments, **keywords), moved
        return functional_call(self.model, (params, state), arguments, keywords), moved

    def _loss(
        self, params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs, targets: Tensor
    ) -> tuple[Tensor, Tensors]:
        output, moved = self._forward(params, buffers, keys, inputs)
        return self.loss_function(output, targets), moved

    def _loss_of_leaf(
        self, value: Tensor, params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs, targets: Tensor
    ) -> Tensor:
        return self._loss(params, buffers, keys, with_leaf(inputs, self.perturb, value), targets)[0]

    def _features(self, layer: str, params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs) -> Tensor:
        caught: list[Tensor] = []

        def catch(module: nn.Module, arguments: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise FedveilError(f"the layer '{layer}' does not give one tensor: name a layer inside or behind it")
            caught.append(output.clone())  # a layer behind may work in place

        handle = self.model.get_submodule(layer).register_forward_hook(catch)
        return self._caught(layer, caught, handle, params, buffers, keys, inputs)

    def _taken_in(
        self, value: Tensor, layer: str, params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs
    ) -> Tensor:
        """What a layer takes in, as a function of the perturbed leaf of the inputs: one row per example."""
        caught: list[Tensor] = []

        def catch(module: nn.Module, arguments: Any) -> None:
            if not (arguments and isinstance(arguments[0], Tensor) and arguments[0].dim() == 2):
                raise FedveilError(f"the layer '{layer}' does not take in one row of features per example")
            caught.append(arguments[0].clone())

        handle = self.model.get_submodule(layer).register_forward_pre_hook(catch)
        return self._caught(layer, caught, handle, params, buffers, keys, with_leaf(inputs, self.perturb, value))

    def _caught(
        self,
        layer: str,
        caught: list[Tensor],
        handle: RemovableHandle,
        params: Tensors,
        buffers: Tensors,
        keys: Tensors,
        inputs: Inputs,
    ) -> Tensor:
        """What a hook caught of a layer in one forward pass."""
        try:
            self._forward(params, buffers, keys, inputs)
        finally:
            handle.remove()
        if not caught:
            raise FedveilError(f"the model does not call its layer '{layer}' on these inputs")
        return caught[-1]

    # ---- the same with torch.func, for one client: what `vmap` and `compile` wrap -----------------------

    def _pure(self, kind: str) -> Callable[..., Any]:
        if kind == "gradient":

            def gradient(params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs, targets: Tensor) -> Any:
                update, (loss, moved) = grad_and_value(self._loss, has_aux=True)(params, buffers, keys, inputs, targets)
                return update, loss, moved

            return gradient
        if kind == "input_gradient":

            def input_gradient(
                params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs, targets: Tensor
            ) -> Any:
                value = leaf(inputs, self.perturb)
                return grad_and_value(self._loss_of_leaf)(value, params, buffers, keys, inputs, targets)

            return input_gradient
        if kind == "example_gradients":

            def one(
                place: Tensor, params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs, target: Tensor
            ) -> Tensors:
                single = map_inputs(lambda tensor: tensor.unsqueeze(0), inputs)
                own = {name: example_key(key, place) for name, key in keys.items()}
                update, _ = grad(self._loss, has_aux=True)(params, buffers, own, single, target.unsqueeze(0))
                return update  # type: ignore[no-any-return]

            def example_gradients(
                params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs, targets: Tensor
            ) -> Any:
                places = torch.arange(len(targets), device=targets.device)
                every = vmap(one, in_dims=(0, None, None, None, 0, 0))
                return every(places, params, buffers, keys, inputs, targets)

            return example_gradients
        if kind in ("loss", "evaluation loss"):
            return lambda *arguments: self._loss(*arguments)[0]
        if kind.startswith("sensitivity "):
            sensed = kind.removeprefix("sensitivity ")

            def sensitivity(params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs, chosen: Tensor) -> Any:
                def taken_in(value: Tensor) -> Tensor:
                    return self._taken_in(value, sensed, params, buffers, keys, inputs)

                taken, pull = vjp(taken_in, leaf(inputs, self.perturb))  # type: ignore[misc]
                column = torch.arange(taken.shape[1], device=taken.device)

                def norms(feature: Tensor) -> Tensor:
                    slope: Tensor = pull((column == feature).to(taken.dtype).expand_as(taken))[0]
                    return slope.flatten(1).square().sum(1).sqrt()

                return taken[:, chosen], vmap(norms, chunk_size=FEATURES_AT_ONCE)(chosen).T

            return sensitivity
        layer = kind.removeprefix("features ")
        return lambda params, buffers, keys, inputs, targets: self._features(layer, params, buffers, keys, inputs)

    # ---- and with plain autograd, for any module -------------------------------------------------------

    def _lend(self, params: Tensors) -> Tensors:
        """The engine's own parameters with one client's weights in them, not copied.

        A model called with its own parameters costs nothing on top, where `functional_call` would cost as much as a
        small layer.
        """
        if params is self._lender and self._lent is not None:
            return self._lent
        if self._lent is None:
            self._own_values = {name: self._own[name].data for name in params}
        self._lender, self._lent = params, {name: self._own[name] for name in params}
        for own, tensor in zip(self._lent.values(), params.values(), strict=True):
            own.data = tensor
            if not own.requires_grad:
                own.requires_grad_()
        return self._lent

    def _put_buffers(self, buffers: Tensors) -> None:
        for name, buffer in buffers.items():
            module, _, short = name.rpartition(".")
            (self._stand_ins.get(name) or self.model.get_submodule(module))._buffers[short] = buffer

    def _take_back(self) -> None:
        """Leave the engine's own model as it was."""
        for name, tensor in self._own_values.items():
            self._own[name].data = tensor
        self._put_buffers(self._own_buffers)
        self._lender = self._lent = None
        self._own_values = {}

    def _plain(
        self, kind: str, params: Tensors, buffers: Tensors, keys: Tensors, inputs: Inputs, targets: Tensor
    ) -> Any:
        params = self._lend(params)
        if kind == "gradient":
            loss, moved = self._passed(self._loss, params, buffers, keys, inputs, targets)
            return self._gradients(loss, params), loss.detach(), {n: t.detach() for n, t in moved.items()}
        if kind == "input_gradient":
            value = leaf(inputs, self.perturb).detach().requires_grad_()
            loss = self._passed(self._loss_of_leaf, value, params, buffers, keys, inputs, targets)
            return self._gradients(loss, {"value": value})["value"], loss.detach()
        if kind == "example_gradients":
            rows = []
            for i in range(len(targets)):
                single = map_inputs(lambda tensor, i=i: tensor[i : i + 1], inputs)  # type: ignore[misc]
                own = {name: example_key(key, i) for name, key in keys.items()}
                loss, _ = self._passed(self._loss, params, buffers, own, single, targets[i : i + 1])
                rows.append(self._gradients(loss, params))
            return dict(Tree.stack(rows))
        if kind.startswith("sensitivity "):
            value = leaf(inputs, self.perturb).detach().requires_grad_()
            layer = kind.removeprefix("sensitivity ")
            taken = self._passed(self._taken_in, value, layer, params, buffers, keys, inputs)
            norms = []
            for feature in targets.tolist():
                slope = torch.autograd.grad(taken[:, feature].sum(), value, retain_graph=True)[0]
                norms.append(slope.flatten(1).square().sum(1).sqrt())
            return taken[:, targets].detach(), torch.stack(norms, dim=1)
        with torch.no_grad():
            if kind in ("loss", "evaluation loss"):
                return self._passed(self._loss, params, buffers, keys, inputs, targets)[0]
            return self._passed(self._features, kind.removeprefix("features "), params, buffers, keys, inputs)

    def _passed(self, forward: Callable[..., Any], *arguments: Any) -> Any:
        with self.precision():
            return forward(*arguments)

    def _gradients(self, loss: Tensor, params: Tensors) -> Tensors:
        """The gradient of a loss in every parameter; zeros for one that the loss does not touch."""
        scale = self.loss_scale
        start = None if scale == 1 else torch.full_like(loss, scale)
        found = torch.autograd.grad(loss, list(params.values()), start, allow_unused=True)
        dense = [None if g is None else g.to_dense() if g.is_sparse else g for g in found]
        pairs = zip(params.items(), dense, strict=True)
        return {n: torch.zeros_like(p) if g is None else g if start is None else g / scale for (n, p), g in pairs}

    # ---- running on the client axis --------------------------------------------------------------------

    def _run(self, kind: str, params: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, streams: Streams) -> Any:
        keys: Tensors = {}
        if self.key_names and any(isinstance(m, KeyedDropout) and m.training for m in self.model.modules()):
            keys = {name: streams.fold(name).key64().to(targets.device) for name in self.key_names}
        elif self.key_names:
            keys = {name: targets.new_zeros(len(targets), dtype=torch.int64) for name in self.key_names}
        if self.own:
            with keyed_for_a_while(self.model) as self._stand_ins:
                self._own, self._own_buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
                keys = {name: streams.fold(name).key64().to(targets.device) for name in self._stand_ins}
                return self._looped(kind, params, buffers, keys, inputs, targets, streams)
        if self.backend == "loop":
            return self._looped(kind, params, buffers, keys, inputs, targets, streams)
        given = inputs if isinstance(inputs, Tensor) else dict(inputs)  # a tokenizer's mapping is no dict
        arguments = (dict(params), dict(buffers), keys, given, targets)
        # A single client's weights are one copy too; only where a graph for several copies exists is that one used.
        shared = params.repeated or (len(targets) == 1 and (kind, False) not in self._compiled_shapes)
        parts = []
        for start in range(0, len(targets), self.chunk):
            part = map_nested(lambda t, start=start: t[start : start + self.chunk], arguments)  # type: ignore[misc]
            parts.append(self._chunk(kind, shared, part))
        return parts[0] if len(parts) == 1 else zip_nested(torch.cat, parts)

    def _looped(
        self, kind: str, params: Tree, buffers: Tree, keys: Tensors, inputs: Inputs, targets: Tensor, streams: Streams
    ) -> Any:
        count = len(targets)
        # Where all clients have one copy of the weights, it is lent to the model once.
        weights = [params.row(0)] * count if params.repeated else [params.row(k) for k in range(count)]
        clients = [
            (weights[k], buffers.row(k), {name: key[k] for name, key in keys.items()}, take(inputs, k), targets[k])
            for k in range(count)
        ]
        try:
            with torch.enable_grad():
                return self._one_by_one(kind, clients, streams)
        finally:
            self._take_back()

    def _one_by_one(self, kind: str, clients: list[Any], streams: Streams) -> Any:
        modes = tuple(module.training for module in self.model.modules())
        return self._watch.run(modes, [partial(self._plain, kind, *client) for client in clients], streams)

    def _chunk(self, kind: str, shared: bool, arguments: tuple[Any, ...]) -> Any:
        """One chunk of clients, through the compiled function where its shapes are those it was compiled for."""
        count = len(arguments[4])
        if shared:  # one copy of the weights serves all: cheaper than K equal ones
            arguments = ({name: tensor[0] for name, tensor in arguments[0].items()}, *arguments[1:])
        dims = (None if shared else 0, 0, 0, 0, 0)
        # Compiling one backward pass per feature would take minutes.
        if self.backend == "compiled" and not kind.startswith("sensitivity "):
            shapes = shapes_behind(arguments[3:])
            # A ragged last batch is rare: it is not worth half a minute of compiling, and runs stacked.
            if self._compiled_shapes.setdefault((kind, shared), shapes) == shapes and compiler_found():
                weights = arguments[0] if shared else pad_clients(arguments[0], self.chunk)
                padded = (weights, *pad_clients(arguments[1:], self.chunk))
                result = self._function(kind, dims, compiled=True)(*padded)
                return map_nested(lambda tensor: tensor[:count], result) if count < self.chunk else result
        return self._function(kind, dims, compiled=False)(*arguments)

    def _function(self, kind: str, dims: tuple[int | None, ...], compiled: bool) -> Callable[..., Any]:
        key = (kind, dims, compiled)
        if key not in self._functions:
            stacked = vmap(self._pure(kind), in_dims=dims, randomness="error")
            self._functions[key] = compile_once(stacked, kind) if compiled else stacked
        return self._functions[key]
