"""What was behind captured updates, and other examples of the same kind: for scoring only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.auditing.candidates import Originals
from fedveil.auditing.capture_checks import Attackable, examples_of
from fedveil.clients.engine import Loss
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, Truth
from fedveil.registry import datasets
from fedveil.tasks.datasets.base import DataSet, LoadedData
from fedveil.tasks.normalization import LOOSE, Normalization
from fedveil.tasks.own_data import OwnData
from fedveil.tasks.own_files import is_reference
from fedveil.tasks.splits import read_split
from fedveil.tasks.task import Task, task

OneTruth = Truth | Path | str | tuple[Tensor, Tensor]
Data = Task | str | tuple[Tensor, Tensor]


def read_truths(given: OneTruth | Sequence[OneTruth] | None, count: int) -> list[Truth]:
    """What was behind each of `count` captures, in their order; nothing where nothing is given."""
    if given is None:
        return []
    pair = isinstance(given, tuple) and len(given) == 2 and all(isinstance(each, Tensor) for each in given)
    listed: Sequence[Any] = [given] if pair or isinstance(given, Truth | Path | str) else list(given)
    if len(listed) != count:
        raise FedveilError(f"{count} captures but {len(listed)} truths: give one for each, in their order")
    return [_truth(each) for each in listed]


def _truth(given: Any) -> Truth:
    if isinstance(given, Truth):
        return given
    if isinstance(given, Path | str):
        return Truth.load(given)
    if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(each, Tensor) for each in given):
        return Truth(given[0].detach(), given[1].detach(), seen=given[0].detach())
    raise FedveilError(f"a truth is (inputs, targets), a Truth or its file, not {type(given).__name__}")


def originals_of(truths: Sequence[Truth], captures: Sequence[Capture], known: Attackable) -> Originals:
    """The images behind every capture, checked: they must belong to it."""
    for truth, capture in zip(truths, captures, strict=True):
        _check_truth(truth, capture, known)
    parts = {}
    for name in ("inputs", "seen"):
        each = [getattr(truth, name)[: examples_of(capture)] for truth, capture in zip(truths, captures, strict=True)]
        parts[name] = torch.stack(each).float()
    labels = torch.stack([truth.targets[: examples_of(each)] for truth, each in zip(truths, captures, strict=True)])
    _check_labels(labels, known.classes)
    return Originals(parts["inputs"], labels, parts["seen"], captures[0].round)


def _check_truth(truth: Truth, capture: Capture, known: Attackable) -> None:
    size, shape = examples_of(capture), known.shape
    if not isinstance(truth.inputs, Tensor) or truth.inputs.dim() != 4:
        raise FedveilError("only images can be scored: this truth holds other inputs")
    if tuple(truth.inputs.shape[1:]) != shape:
        raise FedveilError(
            f"a truth holds images of shape {tuple(truth.inputs.shape[1:])}, its capture is of inputs of {shape}: "
            "they do not belong together"
        )
    if not truth.inputs.is_floating_point():
        raise FedveilError(f"a truth holds images as the model takes them, not {truth.inputs.dtype}")
    if len(truth.inputs) not in (size, sum(capture.batch_sizes)):  # of one local epoch, or of all
        raise FedveilError(
            f"a truth holds {len(truth.inputs)} examples, its capture is of {size}: they do not belong together"
        )
    pixels = known.normalization.pixels(truth.inputs.float())
    low, high = float(pixels.min()), float(pixels.max())
    if low < -LOOSE or high > 1 + LOOSE:
        raise FedveilError(
            f"the pixels of a truth range from {low:.4g} to {high:.4g} instead of 0 to 1: say how the inputs were "
            "normalized, normalization=fedveil.Normalization(mean, std), or the facts mean and std of the capture"
        )


def _check_labels(labels: Tensor, classes: int | None) -> None:
    """Refuse labels that are not one class of the model per example."""
    if labels.dim() != 2 or labels.is_floating_point() or labels.is_complex():
        raise FedveilError(
            f"labels must be whole numbers, one per example: not {labels.dtype} of shape {tuple(labels.shape[1:])}"
        )
    if classes is not None and labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise FedveilError(f"labels must be between 0 and {classes - 1}: they do not belong to this model")


# ---- other examples --------------------------------------------------------------------------------------------


def others_of(data: Data, known: Attackable, loss: Loss, data_root: Path | None = None) -> Task:
    """Other examples of the same kind, as a task: its test part is what the originals are told from."""
    if isinstance(data, str) and is_reference(data):
        data = task(data, model=known.model)
    if isinstance(data, Task):
        _check_normalization(data, known)
        found = data
    elif isinstance(data, str):
        found = _named(data, known, loss, data_root)
    elif isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(each, Tensor) for each in data):
        found = _own(data[0].detach(), data[1].detach(), known, loss)
    else:
        raise FedveilError(f"data must be a data set's name, tensors (inputs, labels) or a Task, not {_type(data)}")
    if found.shape != known.shape:
        raise FedveilError(f"{found.name} has images of shape {found.shape}, the captures of {known.shape}")
    if found.labels is not None:
        raise FedveilError(f"{found.name} has several labels per image: images are told from others of one class each")
    return found


def _named(name: str, known: Attackable, loss: Loss, data_root: Path | None) -> Task:
    """A data set by name, with the normalization that the captures tell, whatever its own is."""
    source: DataSet = datasets.parse(name)
    loaded = source.load(data_root)
    if not isinstance(loaded, LoadedData):
        raise FedveilError(f"{name} holds no images: images are told from other images")
    if loaded.shape != known.shape:
        raise FedveilError(f"{name} has images of shape {loaded.shape}, the captures of {known.shape}")
    parts = read_split("own").divide(replace(loaded, normalization=known.normalization), 0)
    return Task(known.model, OwnData(parts), loss, clients=1, normalization=known.normalization, name=source.name)


def _own(inputs: Tensor, labels: Tensor, known: Attackable, loss: Loss) -> Task:
    """Tensors: inputs as the model takes them, or pixels in bytes. All of them serve as others."""
    normalization = _stated(known.normalization)
    normalized = inputs.is_floating_point() and normalization is not None
    both = ((inputs, labels), (inputs, labels))
    if tuple(inputs.shape[1:]) != known.shape:
        raise FedveilError(f"data holds images of shape {tuple(inputs.shape[1:])}, the captures of {known.shape}")
    try:
        return Task(known.model, both, loss, clients=1, normalization=normalization, normalized=normalized)
    except FedveilError as error:
        raise FedveilError(f"data must be inputs as the model takes them, with their labels: {error}") from None


def _check_normalization(given: Task, known: Attackable) -> None:
    if _stated(given.normalization) != _stated(known.normalization):
        raise FedveilError(
            f"the task's {given.normalization or 'pixels as they are'} and the captures' {known.normalization} differ: "
            "inputs must have been normalized alike to be compared"
        )


def _stated(normalization: Normalization | None) -> Normalization | None:
    """None where inputs are the pixels themselves."""
    if normalization is None or (set(normalization.mean), set(normalization.std)) == ({0.0}, {1.0}):
        return None
    return normalization


def _type(data: object) -> str:
    return type(data).__name__
