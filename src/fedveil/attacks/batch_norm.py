"""The batch-norm prior: features of a batch have the mean and variance that the global model saw in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.errors import FedveilError

Tensors = dict[str, Tensor]
Norm = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class BatchNormStatistics:
    """`weight` times the squared distance of a batch's features to the running statistics, at every batch norm.

    Our reading: means are measured in running standard deviations and variances in running variances, mean over
    channels and layers, so that layers of unlike scale count alike. The paper adds the norms of the plain differences.
    Statistics that no training has moved yet tell nothing: they count for nothing.
    """

    weight: float

    def __call__(self, model: nn.Module, params: Tensors, buffers: Tensors, inputs: Tensor) -> Tensor:
        """The weighted prior of one victim's inputs (B, ...): a pure function that `vmap` can stack."""
        parts = []
        for name, (mean, variance) in batch_statistics(model, params, buffers, inputs).items():
            usual, spread, taken = (_buffer(buffers, name, each) for each in _BUFFERS)
            scale = spread + _norms(model)[name].eps
            off = (mean - usual).square() / scale + ((variance - spread) / scale).square()
            parts.append((taken > 0).to(off) * off.mean())
        return self.weight * torch.stack(parts).mean()


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def batch_statistics(
    model: nn.Module, params: Tensors, buffers: Tensors, inputs: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and unbiased variance per channel of what reaches each batch norm, by its name. Buffers stay as they are."""
    caught: dict[str, tuple[Tensor, Tensor]] = {}

    def catching(name: str) -> Any:
        def catch(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            features = arguments[0].transpose(0, 1).flatten(1)  # channels first
            caught[name] = features.mean(1), features.var(1, correction=min(1, features.shape[1] - 1))

        return catch

    handles = [norm.register_forward_pre_hook(catching(name)) for name, norm in _norms(model).items()]
    try:
        moved = {name: buffer.clone() for name, buffer in buffers.items()}
        functional_call(model, (params, moved), (inputs,))
    finally:
        for handle in handles:
            handle.remove()
    return caught


def require_statistics(model: nn.Module) -> None:
    """Refuse a model whose batch norms keep no statistics, or that has none."""
    if not _norms(model):
        raise FedveilError(
            "the batch-norm prior needs a model whose batch norms keep running statistics, and this one has none: "
            "leave statistics off"
        )


def _norms(model: nn.Module) -> dict[str, Norm]:
    """The batch norms that keep statistics, by name."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, Norm))
    return {name: module for name, module in found if module.running_mean is not None}


def _buffer(buffers: Tensors, name: str, part: str) -> Tensor:
    return buffers[f"{name}.{part}".removeprefix(".")]
