"""What an engine computes of a client, each quantity in two ways that give the same answer.

`pure` is a function that `torch.func` can transform: `vmap` and `compile` wrap it. `plain` uses autograd and serves any
module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vjp, vmap

from fedveil.clients.dropout import example_key
from fedveil.clients.graph import NotUnderstood
from fedveil.clients.local_jacobian import row_lengths
from fedveil.clients.passes import OneClient, Passes, Tensors
from fedveil.errors import FedveilError
from fedveil.tasks.inputs import Inputs, leaf, map_inputs
from fedveil.tree import Tree

FEATURES_AT_ONCE = 8  # backward passes that `Sensitivity` stacks: more would cost memory and save little


class Quantity(Protocol):
    """Something to compute of one client. Equal ones are compiled once."""

    name: ClassVar[str]  # of the compiled function, in profiles
    compiles: ClassVar[bool]  # whether compiling it can pay

    def pure(self, passes: Passes, client: OneClient) -> Any:
        """The value, by `torch.func`."""

    def plain(self, passes: Passes, client: OneClient) -> Any:
        """The value, by autograd. The client's weights are lent to the model."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of the mean loss in every parameter, the loss, and the moved buffers."""

    name: ClassVar[str] = "gradient"
    compiles: ClassVar[bool] = True

    def pure(self, passes: Passes, client: OneClient) -> tuple[Tensors, Tensor, Tensors]:
        """See `Quantity`."""
        update, (loss, moved) = grad_and_value(passes.loss_and_buffers, has_aux=True)(*client)
        return update, loss, moved

    def plain(self, passes: Passes, client: OneClient) -> tuple[Tensors, Tensor, Tensors]:
        """See `Quantity`."""
        loss, moved = passes.in_precision(passes.loss_and_buffers, *client)
        return passes.gradients(loss, client.params), loss.detach(), {n: t.detach() for n, t in moved.items()}


@dataclass(frozen=True)
class InputGradient:
    """The gradient of the mean loss in the perturbed leaf of the inputs, and the loss."""

    name: ClassVar[str] = "input_gradient"
    compiles: ClassVar[bool] = True

    def pure(self, passes: Passes, client: OneClient) -> tuple[Tensor, Tensor]:
        """See `Quantity`."""
        return grad_and_value(passes.loss_at)(leaf(client.inputs, passes.perturb), client)

    def plain(self, passes: Passes, client: OneClient) -> tuple[Tensor, Tensor]:
        """See `Quantity`."""
        value = leaf(client.inputs, passes.perturb).detach().requires_grad_()
        loss = passes.in_precision(passes.loss_at, value, client)
        return passes.gradients(loss, {"value": value})["value"], loss.detach()


@dataclass(frozen=True)
class ExampleGradients:
    """The gradient of every example on its own, stacked."""

    name: ClassVar[str] = "example_gradients"
    compiles: ClassVar[bool] = True

    def pure(self, passes: Passes, client: OneClient) -> Tensors:
        """See `Quantity`."""
        params, buffers, keys, inputs, targets = client

        def one(index: Tensor, example: Inputs, target: Tensor) -> Tensors:
            single = map_inputs(lambda tensor: tensor.unsqueeze(0), example)
            own = {name: example_key(key, index) for name, key in keys.items()}
            update, _ = grad(passes.loss_and_buffers, has_aux=True)(params, buffers, own, single, target.unsqueeze(0))
            return update  # type: ignore[no-any-return]

        return vmap(one)(torch.arange(len(targets), device=targets.device), inputs, targets)

    def plain(self, passes: Passes, client: OneClient) -> Tensors:
        """See `Quantity`."""
        rows = []
        for i in range(len(client.targets)):
            single = map_inputs(lambda tensor, i=i: tensor[i : i + 1], client.inputs)  # type: ignore[misc]
            own = {name: example_key(key, i) for name, key in client.keys.items()}
            alone = OneClient(client.params, client.buffers, own, single, client.targets[i : i + 1])
            loss, _ = passes.in_precision(passes.loss_and_buffers, *alone)
            rows.append(passes.gradients(loss, client.params))
        return dict(Tree.stack(rows))


@dataclass(frozen=True)
class MeanLoss:
    """The mean loss. What was compiled in one mode of the model must not serve the other."""

    training: bool = True
    name: ClassVar[str] = "loss"
    compiles: ClassVar[bool] = True

    def pure(self, passes: Passes, client: OneClient) -> Tensor:
        """See `Quantity`."""
        return passes.loss_and_buffers(*client)[0]

    def plain(self, passes: Passes, client: OneClient) -> Tensor:
        """See `Quantity`."""
        with torch.no_grad():
            return passes.in_precision(passes.loss_and_buffers, *client)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Features:
    """The output of a layer."""

    layer: str
    name: ClassVar[str] = "features"
    compiles: ClassVar[bool] = True

    def pure(self, passes: Passes, client: OneClient) -> Tensor:
        """See `Quantity`."""

        def output(module: nn.Module, arguments: Any, given: Any) -> Tensor:
            if not isinstance(given, Tensor):
                raise FedveilError(
                    f"the layer '{self.layer}' does not give one tensor: name a layer inside or behind it"
                )
            return given.clone()  # a layer behind may work in place

        return _caught(self.layer, "register_forward_hook", output, passes, client)

    def plain(self, passes: Passes, client: OneClient) -> Tensor:
        """See `Quantity`."""
        with torch.no_grad():
            return passes.in_precision(self.pure, passes, client)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Sensitivity:
    """Some features that a layer takes in, and the norms of their gradients in the inputs.

    There is no loss, so there are no targets: the numbers of the chosen features go in their place.
    """

    layer: str
    name: ClassVar[str] = "sensitivity"
    compiles: ClassVar[bool] = False  # one backward pass per feature would take minutes to compile

    def pure(self, passes: Passes, client: OneClient) -> tuple[Tensor, Tensor]:
        """See `Quantity`."""
        chosen = client.targets
        taken, pull = vjp(  # type: ignore[misc]
            lambda value: self._taken_in(passes, passes.moved_to(value, client)), leaf(client.inputs, passes.perturb)
        )
        column = torch.arange(taken.shape[1], device=taken.device)

        def norms(feature: Tensor) -> Tensor:
            slope: Tensor = pull((column == feature).to(taken.dtype).expand_as(taken))[0]
            return slope.flatten(1).square().sum(1).sqrt()

        return taken[:, chosen], vmap(norms, chunk_size=FEATURES_AT_ONCE)(chosen).T

    def plain(self, passes: Passes, client: OneClient) -> tuple[Tensor, Tensor]:
        """See `Quantity`."""
        value = leaf(client.inputs, passes.perturb).detach().requires_grad_()
        taken = passes.in_precision(self._taken_in, passes, passes.moved_to(value, client))
        norms = []
        for feature in client.targets.tolist():
            slope = torch.autograd.grad(taken[:, feature].sum(), value, retain_graph=True)[0]
            norms.append(slope.flatten(1).square().sum(1).sqrt())
        return taken[:, client.targets].detach(), torch.stack(norms, dim=1)

    def _taken_in(self, passes: Passes, client: OneClient) -> Tensor:
        """What the layer takes in: one row per example."""

        def taken_in(module: nn.Module, arguments: Any) -> Tensor:
            if not (arguments and isinstance(arguments[0], Tensor) and arguments[0].dim() == 2):
                raise FedveilError(f"the layer '{self.layer}' does not take in one row of features per example")
            return arguments[0].clone()

        return _caught(self.layer, "register_forward_pre_hook", taken_in, passes, client)


@dataclass(frozen=True)
class LocalSensitivity(Sensitivity):
    """The same for networks of convolutions, all features at once; `NotUnderstood` for others."""

    name: ClassVar[str] = "local_sensitivity"

    def pure(self, passes: Passes, client: OneClient) -> tuple[Tensor, Tensor]:
        """There is none: a client at a time is fast enough."""
        raise NotUnderstood

    def plain(self, passes: Passes, client: OneClient) -> tuple[Tensor, Tensor]:
        """See `Quantity`."""
        value = leaf(client.inputs, passes.perturb).detach().requires_grad_()
        taken = passes.in_precision(self._taken_in, passes, passes.moved_to(value, client))
        lengths = row_lengths(taken, value, len(client.targets))
        return taken[:, client.targets].detach(), lengths[:, client.targets]


def _caught(layer: str, hook: str, value: Callable[..., Tensor], passes: Passes, client: OneClient) -> Tensor:
    """What a hook on a layer finds in one forward pass; in the last call, if there are several."""
    caught: list[Tensor] = []

    def catch(*given: Any) -> None:
        caught.append(value(*given))

    handle = getattr(passes.model.get_submodule(layer), hook)(catch)
    try:
        passes.forward(*client[:4])
    finally:
        handle.remove()
    if not caught:
        raise FedveilError(f"the model does not call its layer '{layer}' on these inputs")
    return caught[-1]
