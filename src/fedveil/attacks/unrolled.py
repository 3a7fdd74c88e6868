"""Local training behind a FedAvg update, unrolled."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedveil.attacks.scene import LocalSteps
from fedveil.clients.sgd import at_rest, sgd_step
from fedveil.defenses.base import StepsBefore, step_weight

Row = dict[str, Tensor]


def unrolled(
    gradient: Callable[..., Row],
    local: LocalSteps,
    order: Tensor | None,
    params: Row,
    buffers: Row,
    inputs: Tensor,
    labels: Tensor,
) -> Row:
    """The pseudo-gradient of local SGD, step by step, as a differentiable function of the inputs.

    Its scale is that of `Updates.gradient`: a constant gradient comes out as itself.

    order: (epochs, examples), which example stands where in each epoch. Without one, every epoch walks through them as
    they stand if the attacker supposes that; else every step takes the mean gradient of all examples, which is what a
    random batch gives on average and does not depend on their order.
    """
    weights, velocity = params, at_rest(params, local.momentum)
    if order is not None:
        walk = order.reshape(-1)
        inputs, labels = inputs[walk], labels[walk]
    for lr, place in zip(local.lr, local.places, strict=True):
        if order is not None:
            data = inputs[place], labels[place]
        elif local.order == "same" or not local.ordered:
            first = place.start % local.examples
            again = slice(first, first + place.stop - place.start)
            data = inputs[again], labels[again]
        else:
            data = inputs, labels
        found = gradient(weights, buffers, *data)
        weights, velocity = sgd_step(
            weights, found, velocity, lr=lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
    scale = step_weight(local.lr, local.momentum)
    return {name: (params[name] - w) / scale for name, w in weights.items()}


def after_steps(
    gradient: Callable[..., Row], before: StepsBefore, params: Row, buffers: Row, inputs: Tensor, labels: Tensor
) -> Row:
    """The gradient at the weights that some plain steps on the same batch lead to."""
    weights = params
    for _ in range(before.steps):
        found = gradient(weights, buffers, inputs, labels)
        weights = {name: w - before.lr * found[name] for name, w in weights.items()}
    return gradient(weights, buffers, inputs, labels)
