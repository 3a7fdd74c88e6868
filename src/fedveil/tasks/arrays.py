"""Arrays of any origin (torch, numpy) as tensors, or one line that says why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.tasks.inputs import Inputs


def is_array(value: object) -> bool:
    """Whether this is one array, or named arrays."""
    if isinstance(value, Mapping):
        return bool(value) and all(is_array(part) for part in value.values())
    return isinstance(value, Tensor | np.ndarray)


def as_tensors(value: Any, what: str) -> Inputs:
    """A tensor or numpy array, or a mapping of them, as inputs. Memory is shared where it can be."""
    if isinstance(value, Mapping):
        return {str(name): _tensor(part, f"{what} '{name}'") for name, part in value.items()}
    return _tensor(value, what)


def as_labels(value: Any, what: str) -> Tensor:
    """One class number per example, int64 (N,), or any number of labels per example, float32 zeros and ones (N, L)."""
    labels = _tensor(value, what)
    if labels.dim() == 2 and labels.is_floating_point():
        if not ((labels == 0) | (labels == 1)).all():
            raise FedveilError(f"{what} have one column per label and so must be 0 or 1")
        return labels.to(torch.float32)
    if labels.dim() != 1:
        raise FedveilError(f"{what} must be one label per example, shape (N,), not {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex():
        raise FedveilError(
            f"{what} must be whole class numbers, not {labels.dtype}: convert them, and back inside the loss if need be"
        )
    return labels.to(torch.int64)


def as_label(value: Any, place: int) -> int:
    """The label of one item of a data set: an integer, or an array that holds one."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        tensor = torch.as_tensor(value)
        if tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex():
            return int(tensor.item())
    elif isinstance(value, int):
        return int(value)
    shown = f"shape {tuple(value.shape)} {value.dtype}" if hasattr(value, "shape") else type(value).__name__
    raise FedveilError(f"the label of example {place} must be one whole class number, not {shown}")


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, np.ndarray):
        raise FedveilError(f"{what} must be a tensor or a numpy array, not {type(value).__name__}")
    try:
        # torch shares memory only with writable arrays in its own byte order and without negative strides.
        native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
        return torch.from_numpy(native if native.flags.writeable else native.copy())
    except TypeError:
        raise FedveilError(f"{what} must hold numbers, not {value.dtype}") from None
