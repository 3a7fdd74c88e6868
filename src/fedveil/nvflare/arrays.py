"""The arrays of NVFlare's messages as tensors by name, and back in the form in which they came."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.errors import FedveilError
from fedveil.tensors import own_memory
from fedveil.tree import REAL

RUNNING = ("*running_mean", "*running_var", "*num_batches_tracked")  # what torch's batch norm keeps


class Parts(NamedTuple):
    """Arrays, told apart."""

    weights: Tensors
    buffers: Tensors


def to_tensors(data: Any) -> Tensors:
    """Copies of all arrays of a message; what is no array of numbers is named."""
    if not isinstance(data, Mapping) or not data:
        raise FedveilError("it holds no arrays by name")
    return {str(name): _tensor(name, value) for name, value in data.items()}


def like(tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors in the form in which they came: NumPy's where it was that."""
    return {
        name: tensor if isinstance(data.get(name), Tensor) else tensor.detach().cpu().contiguous().numpy()
        for name, tensor in tensors.items()
    }


def told_apart(tensors: Tensors, buffer_names: tuple[str, ...]) -> Parts:
    """Weights and buffers. What is no real number and not named as a buffer is refused: no defense could act on it."""
    weights, buffers = {}, {}
    for name, tensor in tensors.items():
        if any(fnmatchcase(name, pattern) for pattern in buffer_names):
            buffers[name] = tensor
        elif tensor.dtype in REAL:
            weights[name] = tensor
        else:
            raise FedveilError(
                f"{name!r:.80} is of type {tensor.dtype}, which no defense protects: name it in buffer_names if it is "
                "a buffer"
            )
    if not weights:
        raise FedveilError("it holds no weights")
    return Parts(weights, buffers)


def _tensor(name: Any, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return own_memory(value)
    if isinstance(value, np.ndarray | np.generic | float) and not isinstance(value, np.bool_ | np.str_ | np.bytes_):
        try:
            return own_memory(torch.from_numpy(np.asarray(value)))
        except TypeError:
            pass
    raise FedveilError(f"{name!r:.80} is not an array of numbers ({type(value).__name__})")
