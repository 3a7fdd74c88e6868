"""What a model and its loss do, as a hash: a name or a class says little about a user's own code."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from fedveil.clients.engine import Loss
from fedveil.tasks.inputs import Inputs, as_arguments, map_inputs


def behavior(model: nn.Module, loss: Loss, row: Mapping[str, Tensor], inputs: Inputs, targets: Tensor) -> str:
    """A SHA-256 of outputs, loss and gradients on a batch, at the weights and buffers of `row`.

    Each tensor enters by two sums, rounded: what differs in the last bits only, as between processors or numbers of
    threads, is the same behavior. A model that draws numbers draws the same ones every time.
    """
    try:
        numbers, digits = _numbers(model, loss, row, inputs, targets, torch.float64), 6
    except Exception:  # whatever foreign code raises that insists on a floating type of its own
        numbers, digits = _numbers(model, loss, row, inputs, targets, None), 3
    # A number that is tiny beside the others is a rounded zero, such as the gradient of a bias before batch norm.
    nothing = max(map(abs, numbers)) * 10.0 ** -(digits + 3)
    words = (f"{0.0 if abs(number) < nothing else number:.{digits}e}" for number in numbers)
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def _numbers(
    model: nn.Module, loss: Loss, row: Mapping[str, Tensor], inputs: Inputs, targets: Tensor, kind: torch.dtype | None
) -> list[float]:
    def cast(tensor: Tensor) -> Tensor:
        made = tensor.detach().clone()  # batch norm moves its buffers
        return made.to(kind) if kind is not None and made.is_floating_point() else made

    own, judged = copy.deepcopy(model), loss
    if kind is not None:
        own = own.to(kind)  # also parameters that are not trained
        judged = copy.deepcopy(loss).to(kind) if isinstance(loss, nn.Module) else loss
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    at = {name: cast(tensor).requires_grad_(name in trained) for name, tensor in row.items()}
    arguments, keywords = as_arguments(map_inputs(cast, inputs))
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        outputs = functional_call(own, at, arguments, keywords)
        value = judged(outputs, cast(targets))
        live = [tensor for tensor in at.values() if tensor.requires_grad]
        gradients = torch.autograd.grad(value, live, allow_unused=True)
    found = [*tree_leaves(outputs), value, *gradients]
    return [number for each in found if isinstance(each, Tensor) for number in _sums(each.detach())]


def _sums(tensor: Tensor) -> tuple[float, float]:
    """The sum of the magnitudes, and one in which every position counts differently."""
    flat = tensor.double().flatten().cpu()
    weights = torch.cos(torch.arange(len(flat), dtype=torch.float64))
    return float(flat.abs().sum()), float((flat * weights).sum())
