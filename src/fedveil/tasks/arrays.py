"""Turn arrays of any origin (torch, numpy, pictures) into tensors, or say in one line why that is impossible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.tasks.inputs import Inputs

if TYPE_CHECKING:
    from PIL.Image import Image


def is_array(value: object) -> bool:
    """Whether this is an array or a mapping of names to arrays."""
    if isinstance(value, Mapping):
        return bool(value) and all(is_array(part) for part in value.values())
    return isinstance(value, Tensor | np.ndarray)


def is_numbers(value: object) -> bool:
    """Whether this is a list of whole numbers, as torchvision's `targets` are."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(part, int | np.integer) for part in value)


def as_tensors(value: Any, what: str) -> Inputs:
    """A tensor, numpy array or picture, or a mapping of them, as inputs. They share memory where possible."""
    if isinstance(value, Mapping):
        return {str(name): _input(part, f"{what} '{name}'") for name, part in value.items()}
    return _input(value, what)


def _input(value: Any, what: str) -> Tensor:
    if isinstance(value, tuple | list):
        raise FedveilError(
            f"{what} has {len(value)} parts without names: write {{'image': a, 'age': b}}, which the model then takes "
            "by keyword"
        )
    return _tensor(_pixels(value, what) if _is_picture(value) else value, what)


def as_labels(value: Any, what: str) -> Tensor:
    """One class number per example, int64 (N,); several labels, float32 zeros and ones (N, L); or numbers to predict.

    Whole numbers (N,) are classes. Floating targets are numbers, float32 (N,) or (N, T), unless all are zeros and ones
    in columns, which are labels.
    """
    labels = _tensor(np.asarray(value) if is_numbers(value) else value, what)
    if labels.dim() == 2 and labels.shape[1] == 1 and not labels.is_floating_point():
        labels = labels[:, 0]
    if labels.dim() not in (1, 2) or labels.is_complex():
        raise FedveilError(f"{what} must be one label per example, shape (N,), not {_shown(labels)}")
    if labels.is_floating_point():
        if not torch.isfinite(labels).all():
            raise FedveilError(f"{what} contain NaN or infinity: remove these examples, or fill them in")
        return labels.to(torch.float32)
    if labels.dim() == 1:
        return labels.to(torch.int64)
    if not ((labels == 0) | (labels == 1)).all():
        raise FedveilError(
            f"{what} have one column per label and so must be 0 or 1; class numbers have shape (N,), not "
            f"{tuple(labels.shape)}, and numbers to predict are floating"
        )
    return labels.to(torch.float32)


def are_labels(targets: Tensor) -> bool:
    """Whether these are several labels per example: rows of zeros and ones."""
    return targets.is_floating_point() and targets.dim() == 2 and bool(((targets == 0) | (targets == 1)).all())


def as_label(value: Any, index: int) -> int | Tensor:
    """The label of one item of a data set: an integer, an array that holds one, a row of zeros and ones, or numbers."""
    if isinstance(value, Tensor | np.ndarray | np.generic | float):
        tensor = torch.as_tensor(value)
        if tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex():
            return int(tensor.item())
        if tensor.is_floating_point() and tensor.dim() < 2 and tensor.numel() and bool(torch.isfinite(tensor).all()):
            return tensor.to(torch.float32)
        if tensor.dim() == 1 and len(tensor) > 1 and ((tensor == 0) | (tensor == 1)).all():
            return tensor.to(torch.float32)
    elif isinstance(value, int):
        return int(value)
    shown = _shown(value) if hasattr(value, "shape") else type(value).__name__
    raise FedveilError(
        f"the label of example {index} must be one whole class number, not {shown}; "
        "for several labels, a row of zeros and ones; for regression, finite floating numbers"
    )


def _shown(value: Tensor | np.ndarray) -> str:
    return f"shape {tuple(value.shape)} {value.dtype}"


def join_labels(labels: Sequence[int | Tensor]) -> Tensor:
    """Join the labels of single items into one tensor."""
    rows = [label for label in labels if isinstance(label, Tensor)]
    if not rows:
        return torch.tensor(labels, dtype=torch.int64)
    if len(rows) < len(labels) or len({row.shape for row in rows}) > 1:
        raise FedveilError("the labels must be all class numbers, or all rows of equally many numbers")
    return torch.stack(rows)


def check_not_one_hot(labels: Tensor) -> None:
    """Refuse rows with exactly one 1 each: they are most likely classes, and would be treated as several labels."""
    if are_labels(labels) and labels.shape[1] > 1 and (labels.sum(1) == 1).all():
        raise FedveilError(
            "every row of the targets has exactly one 1, as one-hot classes do: give class numbers, targets.argmax(1); "
            "if they are labels of which an example may have several, give loss=binary_cross_entropy_with_logits"
        )


def _is_picture(value: Any) -> TypeGuard[Image]:
    # Recognized by the module of its class, so that PIL is imported only where there are pictures.
    return any(cls.__module__ == "PIL.Image" and cls.__name__ == "Image" for cls in type(value).__mro__)


def _pixels(picture: Image, what: str) -> np.ndarray:
    """A picture as (channels, height, width), uint8."""
    if picture.mode not in ("L", "RGB"):
        raise FedveilError(f"{what} is a picture of mode {picture.mode}: use picture.convert('RGB'), or 'L' for gray")
    pixels = np.array(picture)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


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
