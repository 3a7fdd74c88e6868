"""Targets that are numbers to predict: the loss, and how far predictions are off."""

from __future__ import annotations

from torch import Tensor

from fedveil.errors import FedveilError


def predicted(output: Tensor, targets: Tensor) -> Tensor:
    """A model's output in the form of the targets: one output per example may be (N, 1) where targets are (N,).

    Torch's own losses would broadcast these against each other and compare every prediction with every target.
    """
    if not isinstance(output, Tensor) or output.numel() != targets.numel() or output.shape[:1] != targets.shape[:1]:
        shown = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise FedveilError(f"the model gives {shown}, expected {tuple(targets.shape)}: one prediction for each number")
    return output.reshape(targets.shape)


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error: the usual loss of regression.

    >>> from torch import tensor
    >>> squared_error(tensor([[1.0], [4.0]]), tensor([1.0, 2.0]))
    tensor(2.)
    """
    return (predicted(output, targets) - targets).square().mean()


def variance(targets: Tensor) -> float:
    """The mean squared error of always answering the mean of the targets.

    >>> from torch import tensor
    >>> variance(tensor([1.0, 3.0]))
    1.0
    """
    wide = targets.double()
    return float((wide - wide.mean(0)).square().mean())
