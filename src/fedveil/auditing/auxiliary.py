"""Auxiliary data: what attackers may learn from before they see a victim. Nothing of a victim is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fedveil.auditing.result import AuxiliaryData
from fedveil.auditing.settings import HELD_OUT, NONE, AuditSettings
from fedveil.errors import FedveilError
from fedveil.leakage.modalities import modality_of
from fedveil.registry import datasets
from fedveil.tasks.arrays import as_labels, as_tensors
from fedveil.tasks.datasets.base import DataSet, LoadedData
from fedveil.tasks.examples import ArrayExamples, DatasetExamples, Examples
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tasks.from_files import CLIENTS, read_file_data
from fedveil.tasks.inputs import Inputs
from fedveil.tasks.model_check import floating_type
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.own_files import is_reference
from fedveil.tasks.splits import OwnSplit
from fedveil.tasks.task import Task
from fedveil.tasks.text_form import tokens_of

AT_ONCE = 4096  # examples that are read at a time


@dataclass(frozen=True, eq=False)
class Auxiliary:
    """Examples to learn from, and where they come from in words."""

    examples: Examples
    source: str  # "mnist"
    part: str  # "held-out test images", "training images"
    dropped: int = 0  # which the task holds too
    left: int = 0  # which were there, too, beyond the most that are used

    @cached_property
    def content(self) -> str:
        """A hash of the examples, read a part at a time."""
        return fingerprint(
            (f"{place} {name}", tensor)
            for place, (inputs, labels) in enumerate(self.examples.batches(AT_ONCE))
            for name, tensor in (("x", _tensor(inputs)), ("y", labels))
        )

    @property
    def count(self) -> str:
        """How many of what: "5,000 held-out test images"."""
        return f"{len(self.examples):,} {self.part}"

    @property
    def words(self) -> str:
        """The same with where they come from."""
        return f"{self.count} of {self.source}"

    @property
    def told(self) -> str:
        """What was left out of it, as a sentence; empty where nothing was."""
        parts = [f"{self.dropped:,} that the task holds too"] if self.dropped else []
        parts += [f"{self.left:,} beyond the most that are used (auxiliary_most)"] if self.left else []
        return f"Left out: {' and '.join(parts)}." if parts else ""

    def document(self) -> AuxiliaryData:
        """As a result keeps it."""
        return AuxiliaryData(
            source=self.source, part=self.part, used=len(self.examples), dropped=self.dropped, left=self.left
        )

    def without(self, others: Iterable[Examples], task: Task) -> Self:
        """The same without copies of other examples of a task, whatever their labels are."""
        kept = places_apart(self.examples, others, task)
        dropped = len(self.examples) - len(kept)
        return replace(self, examples=self.examples.subset(kept), dropped=self.dropped + dropped)

    def at_most(self, count: int) -> Self:
        """So many at most, evenly spread: sets may lie class by class."""
        there = len(self.examples)
        if there <= count:
            return self
        chosen = torch.arange(count) * there // count
        return replace(self, examples=self.examples.subset(chosen), left=there - count)


def places_apart(examples: Examples, others: Iterable[Examples], task: Task) -> list[int]:
    """Where those of a task's examples are that are no copies of others, whatever their labels are."""
    known = {mark for each in others for mark in _marks(each, task)}
    return [place for place, mark in enumerate(_marks(examples, task)) if mark not in known]


def _tensor(inputs: Inputs) -> Tensor:
    return tokens_of(inputs)


def _marks(examples: Examples, task: Task) -> Iterator[bytes]:
    """A short hash of every example, to what it was before it was standardized in single precision.

    Of pictures that is eight bits a pixel: one read as bytes equals the same read as numbers. Of rows it is a
    ten-thousandth of a column's deviation. Of sentences it is their tokens.
    """
    for inputs, _ in examples.batches(AT_ONCE):
        values = _tensor(inputs).float()
        if task.text is not None:
            rough = values.to(torch.int64)
        elif task.columns is not None:
            rough = (values * 1e4).round().to(torch.int64)
        else:
            pixels = values if task.normalization is None else task.normalization.pixels(values)
            rough = (pixels * 255).round().clamp(0, 255).to(torch.uint8)
        for row in rough.flatten(1).numpy():
            yield hashlib.blake2b(row.tobytes(), digest_size=16).digest()


# ---- where they come from ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AuxiliarySource:
    """What attackers are to learn from."""

    settings: AuditSettings
    own: Any = None  # examples of the user's own, in place of what the settings name
    root: Path | None = None  # where the files of data sets are

    @property
    def held_out(self) -> bool:
        """Whether attackers share the held-out examples with the judges."""
        return self.own is None and self.settings.auxiliary == HELD_OUT

    def read(self, task: Task) -> Auxiliary | None:
        """What is named, checked; None where nothing is, or where it is held out."""
        if self.own is None and self.settings.auxiliary in (HELD_OUT, NONE):
            return None
        if task.text is not None:
            raise FedveilError(f"auxiliary data: of text attackers learn from '{HELD_OUT}' sentences, or from '{NONE}'")
        if task.columns is not None:
            raise FedveilError(f"auxiliary data: of a table attackers learn from '{HELD_OUT}' rows, or from '{NONE}'")
        return _named(self.settings.auxiliary, task, self.root) if self.own is None else _own(self.own, task)

    def chosen(
        self, found: Auxiliary | None, held_out: Examples | None, task: Task, others: Iterable[Examples]
    ) -> Auxiliary | None:
        """What attackers get: of what was read or held out, what nobody else holds, and no more than is allowed.

        others: whatever attackers must not have.
        """
        if found is None and held_out is not None:
            found = Auxiliary(held_out, task.name, f"held-out test {modality_of(task).words.many}")
        if found is None:
            return None
        found = found.without(others, task)
        if len(found.examples):
            return found.at_most(self.settings.auxiliary_most)
        if self.held_out:
            return None
        raise FedveilError(
            f"auxiliary data: the task holds all of the {found.dropped:,} {found.part} of {found.source} itself; name "
            f"another data set, limit the task (limit), or use '{HELD_OUT}'"
        )


def _named(name: str, task: Task, root: Path | None) -> Auxiliary:
    """The training part of a data set, normalized as the task's own."""
    if is_reference(name):
        file = read_file_data(name, CLIENTS, OwnSplit(), 0)
        own = file.said.get("normalization")
        if own != task.normalization:
            raise FedveilError(f"auxiliary data: {name} is normalized by {own}, the task by {task.normalization}")
        return _checked(Auxiliary(file.own.parts.train, file.reference.short, "training images"), task)
    source: DataSet = datasets.parse(name)
    loaded = source.load(root)
    if not isinstance(loaded, LoadedData):
        raise FedveilError(f"auxiliary data: {name} holds no images, and the task is of images")
    if loaded.shape != task.shape:
        raise FedveilError(f"auxiliary data: {name} has images of shape {loaded.shape}, the task of {task.shape}")
    classes = len(task.label_names)
    if loaded.classes != classes:
        raise FedveilError(f"auxiliary data: {name} has {loaded.classes} classes, the task has {classes}")
    parts = OwnSplit(validation=0).divide(replace(loaded, normalization=_normalization(task)), 0)
    return _checked(Auxiliary(parts.train, source.name, "training images"), task)


def _own(given: Any, task: Task) -> Auxiliary:
    """Arrays (images, labels), examples or a torch `Dataset`: pixels, or inputs as the task's model takes them."""
    try:
        return _checked(Auxiliary(_examples(given, task.normalization, normalized=False), "your own", "images"), task)
    except FedveilError as error:
        if task.normalization is None or isinstance(given, Examples):
            raise FedveilError(_about(error)) from None
        refused = error
    try:  # no pixels: perhaps inputs as the model takes them
        return _checked(Auxiliary(_examples(given, task.normalization, normalized=True), "your own", "images"), task)
    except FedveilError:
        raise FedveilError(_about(refused)) from None


def _examples(given: Any, normalization: Normalization | None, *, normalized: bool) -> Examples:
    if isinstance(given, Examples):
        return given
    if not isinstance(given, tuple | list):
        return DatasetExamples(given, normalization, normalized=normalized)
    if len(given) != 2:
        raise FedveilError(f"give (images, labels), not {len(given)} things")
    inputs, labels = as_tensors(given[0], "the images"), as_labels(given[1], "the labels")
    return ArrayExamples(inputs, labels, normalization, normalized=normalized)


def _about(error: FedveilError) -> str:
    said = str(error)
    return said if said.startswith("auxiliary data: ") else f"auxiliary data: {said}"


def _normalization(task: Task) -> Normalization:
    if task.normalization is not None:
        return task.normalization
    channels = task.shape[0]
    return Normalization((0.0,) * channels, (1.0,) * channels)


def _checked(found: Auxiliary, task: Task) -> Auxiliary:
    """Refuse what is not of the task's kind; before any long work."""
    if not len(found.examples):
        raise FedveilError(f"auxiliary data: {found.source} has no examples")
    inputs, _ = found.examples.batch([0])
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else None
    if shape != task.shape:
        raise FedveilError(f"auxiliary data: {found.source} has inputs of shape {shape}, the task of {task.shape}")
    labels = found.examples.labels
    if labels.dim() != 1 or labels.is_floating_point():
        raise FedveilError(f"auxiliary data: {found.source} must have one class per image")
    classes = len(task.label_names)
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise FedveilError(
            f"auxiliary data: labels of {found.source} must be between 0 and {classes - 1}, as the task's are (got "
            f"{int(labels.min())} to {int(labels.max())})"
        )
    return replace(found, examples=found.examples.as_type(floating_type(task.model)))
