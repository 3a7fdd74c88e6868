"""The user's own data as training, validation and test examples, and which client has which."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedveil.errors import FedveilError, printable
from fedveil.tasks.arrays import as_labels, as_tensors, is_array, is_numbers
from fedveil.tasks.columns import Column, read_rows
from fedveil.tasks.examples import ArrayExamples, DatasetExamples, Examples, JoinedExamples
from fedveil.tasks.inputs import leaves
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.splits import FractionSplit, Parts, Split, parts_of, shuffled_parts
from fedveil.tasks.tables import TableExamples

logger = logging.getLogger(__name__)

FORMS = "a torch Dataset, arrays (inputs, targets), or a tuple (train, test) or (train, validation, test) of these"
Names = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class OwnData:
    """The training, validation and test examples; each client's indices in the training part, if the user gave them."""

    parts: Parts
    clients: tuple[Tensor, ...] | None = None
    class_names: Names = ()  # from the data sets themselves


@dataclass(frozen=True)
class Reader:
    """Reads data sets with one normalization for all, and divides them with one seed."""

    split: Split | None  # None: 70/15/15 if something has to be divided
    seed: int
    normalization: Normalization | None = None
    normalized: bool = False
    columns: Sequence[str | Column] | str | None = None  # of inputs that are rows of a table

    def read(self, data: Any, clients: Any) -> OwnData:
        """Read data with a number of clients or their indices; or, if `data` is None, the data set of each client."""
        if isinstance(clients, int | np.integer):
            return self._one_owner(data, "data")
        if isinstance(clients, str | bytes) or not hasattr(clients, "__len__"):
            raise FedveilError(f"clients must be a number, indices, or data sets, not {type(clients).__name__}")
        if not len(clients):
            raise FedveilError("clients must be at least 1, got an empty list")
        if all(_is_set(each) or _are_parts(each) for each in clients):
            if data is not None:
                raise FedveilError("each client has a data set of its own: leave data out, Task(model, clients=[...])")
            return self._of_clients(clients)
        return self._with_indices(data, [_indices(each, number) for number, each in enumerate(clients)])

    def _one_owner(self, data: Any, what: str, *path: str | int) -> OwnData:
        if isinstance(data, Parts):
            return OwnData(data)
        if _is_set(data):
            examples = self._examples(data, what)
            return OwnData(
                parts_of(examples, *self._shares(what).indices(len(examples), self.seed, *path)),
                class_names=_names_of(data),
            )
        if not _are_parts(data):
            raise FedveilError(_unreadable(data))
        if self.split is not None:
            raise FedveilError(f"the {what} come in parts already: leave the split out")
        said = ["training", "validation", "test"] if len(data) == 3 else ["training", "test"]
        whose = "" if what == "data" else f" of {what.removesuffix(' data')}"
        first = self._examples(data[0], f"{said[0]} data{whose}")
        # Categories of a table mean the same in all parts: those of the training part.
        other = self if first.columns is None else replace(self, columns=first.columns.all)
        rest = zip(said[1:], data[1:], strict=True)
        read = {said[0]: first} | {name: other._examples(each, f"{name} data{whose}") for name, each in rest}
        names = _same_names({f"{name} data{whose}": _names_of(each) for name, each in zip(said, data, strict=True)})
        return OwnData(Parts(read["training"], read.get("validation"), read["test"]), class_names=names)

    def _of_clients(self, sets: Sequence[Any]) -> OwnData:
        each = [self._one_owner(data, f"client {number} data", number) for number, data in enumerate(sets)]
        if len({(own.parts.validation is None) for own in each}) > 1:
            raise FedveilError("some clients have validation data and others have none: give it to all or to none")
        names = _same_names({f"client {number} data": own.class_names for number, own in enumerate(each)})
        train = _joined([own.parts.train for own in each])
        validation = [own.parts.validation for own in each if own.parts.validation is not None]
        parts = Parts(train, _joined(validation) if validation else None, _joined([own.parts.test for own in each]))
        return OwnData(parts, _one_after_another([len(own.parts.train) for own in each]), names)

    def _with_indices(self, data: Any, indices: list[Tensor]) -> OwnData:
        if not _is_set(data):
            own = self._one_owner(data, "data")
            _check_indices(indices, len(own.parts.train), "training data")
            return OwnData(own.parts, tuple(indices), own.class_names)
        examples = self._examples(data, "data")
        free = _check_indices(indices, len(examples), "data")
        split = self._shares("data")
        if len(free):
            held_out = shuffled_parts(len(free), (split.validation, split.test), self.seed)
            kept = indices
            validation, test = (free[part] for part in held_out)
            logger.warning(
                "%s rows belong to no client: they are held out, %s for validation and %s for the test, and clients "
                "train on all of their rows",
                *(f"{len(rows):,}" for rows in (free, validation, test)),
            )
        else:
            divided = [self._divide_rows(split, rows, number) for number, rows in enumerate(indices)]
            kept = [rows[0] for rows in divided]
            validation, test = (torch.cat([rows[part] for rows in divided]) for part in (1, 2))
        parts = parts_of(examples, torch.cat(kept), validation, test)
        return OwnData(parts, _one_after_another([len(rows) for rows in kept]), _names_of(data))

    def _divide_rows(self, split: FractionSplit, rows: Tensor, number: int) -> list[Tensor]:
        try:
            return [rows[part.sort().values] for part in split.indices(len(rows), self.seed, number)]
        except FedveilError as error:
            raise FedveilError(
                f"client {number}: {error}, or give the test data apart: ((x, y), (x_test, y_test))"
            ) from None

    def _shares(self, what: str) -> FractionSplit:
        split = self.split or FractionSplit()
        if not isinstance(split, FractionSplit):
            raise FedveilError(f"your {what} has no parts of its own: give shares such as 70/15/15, or (train, test)")
        return split

    def _examples(self, data: Any, what: str) -> Examples:
        if isinstance(data, Examples):
            examples = data
        elif self.columns is not None:
            examples = self._table(data, what)
        elif isinstance(data, tuple | list):
            inputs = as_tensors(data[0], f"the inputs of the {what}")
            labels = as_labels(data[1], f"the targets of the {what}")
            examples = ArrayExamples(inputs, labels, self.normalization, normalized=self.normalized)
        elif isinstance(data, IterableDataset):
            raise FedveilError(
                f"{type(data).__name__} can only be iterated over: give a map-style data set, with __len__ and "
                "__getitem__"
            )
        else:
            examples = DatasetExamples(data, self.normalization, normalized=self.normalized)
        if not len(examples):
            raise FedveilError(f"the {what} is empty: give at least one example")
        return examples

    def _table(self, data: Any, what: str) -> TableExamples:
        if not isinstance(data, tuple | list):
            raise FedveilError(f"columns are those of arrays (rows, targets): the {what} are {type(data).__name__}")
        if self.normalization is not None:
            raise FedveilError("a normalization is for images: the columns of a table are standardized by themselves")
        rows = data[0].detach().cpu().numpy() if isinstance(data[0], Tensor) else data[0]
        assert self.columns is not None
        columns, cells = read_rows(rows, self.columns, f"the rows of the {what}")
        return TableExamples(columns, torch.from_numpy(cells), as_labels(data[1], f"the targets of the {what}"))


def _is_set(data: Any) -> bool:
    if isinstance(data, tuple | list):
        return len(data) == 2 and is_array(data[0]) and (is_array(data[1]) or is_numbers(data[1]))
    # Any class with __getitem__ serves as a map-style data set; an array alone has no targets.
    plain = is_array(data) or isinstance(data, str | bytes | dict | range)
    return isinstance(data, Examples | Dataset) or (hasattr(data, "__getitem__") and not plain)


def _are_parts(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) in (2, 3) and all(map(_is_set, data))


def _indices(given: Any, number: int) -> Tensor:
    try:
        indices = torch.as_tensor(np.asarray(given) if isinstance(given, range) else given)
    except (TypeError, ValueError, RuntimeError):
        indices = torch.empty(0)
    if len(indices) and (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool):
        indices = torch.empty(0)
    if indices.dim() != 1 or not len(indices):
        raise FedveilError(
            f"client {number} must have the indices of its examples, such as range(0, 600), or a data set of its own"
        )
    return indices.to(torch.int64)


def _check_indices(clients: Sequence[Tensor], size: int, what: str) -> Tensor:
    """Check that the rows of every client exist and that no two clients share one. Returns the rows of no client."""
    owner = torch.full((size,), -1)
    for number, indices in enumerate(clients):
        if indices.min() < 0 or indices.max() >= size:
            raise FedveilError(f"client {number} must have indices of the {what}, 0 to {size - 1}")
        taken = indices[owner[indices] >= 0]
        if len(taken):
            raise FedveilError(
                f"row {int(taken[0])} belongs to client {int(owner[taken[0]])} and to client {number}: give every row "
                "to one client"
            )
        owner[indices] = number
        if int((owner == number).sum()) < len(indices):
            raise FedveilError(f"client {number} has a row twice: name every row once")
    return (owner == -1).nonzero().flatten()


def _one_after_another(sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(torch.split(torch.arange(sum(sizes)), list(sizes)))


def _joined(sets: Sequence[Examples]) -> Examples:
    layouts = [_layout(each) for each in sets]
    for number, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise FedveilError(f"client {number} has {layout}, client 0 has {layouts[0]}: all must be equal")
    return JoinedExamples(sets)


def _layout(examples: Examples) -> str:
    inputs, targets = examples.batch([0])
    shapes = [f"{name + ' ' if name else ''}{tuple(t.shape[1:])}" for name, t in leaves(inputs).items()]
    labels = f", {targets.shape[1]} labels" if targets.dim() == 2 else ", numbers" if examples.numbers else ""
    if examples.columns is not None:
        said = (f"{c.name} ({len(c.categories)} categories)" if c.categories else c.name for c in examples.columns)
        return f"the columns {', '.join(said)}{labels}"
    return f"inputs of shape {', '.join(shapes)}{labels}"


def _names_of(data: Any) -> Names:
    """The class names of a data set, as torchvision's have them, or of the data set that it is a part of."""
    for _ in range(10):
        found = getattr(data, "classes", None)
        if isinstance(found, list | tuple) and found and all(isinstance(name, str) for name in found):
            return tuple(printable(name) for name in found)
        data = getattr(data, "dataset", None)
    return ()


def _same_names(by_set: dict[str, Names]) -> Names:
    """Check that class numbers mean the same in all sets: a folder that lacks a class would shift them."""
    named = {what: names for what, names in by_set.items() if names}
    for what, names in named.items():
        first, expected = next(iter(named.items()))
        if names != expected:
            raise FedveilError(
                f"the classes of the {first} are {_few(expected)}, those of the {what} are {_few(names)}: they must be "
                "the same, in the same order"
            )
    return next(iter(named.values()), ())


def _few(names: Names) -> str:
    return ", ".join(names[:5]) + (f", … ({len(names)})" if len(names) > 5 else "")


def _unreadable(data: Any) -> str:
    if data is None:
        return f"there is no data: give {FORMS}, or a data set for each client, clients=[...]"
    if isinstance(data, DataLoader):
        return "a DataLoader makes batches of its own: give its data set, loader.dataset"
    if isinstance(data, tuple | list):
        kinds = ", ".join(type(part).__name__ for part in data) or "nothing"
        if len(data) == 2 and isinstance(data[0], tuple | list) and is_array(data[1]):
            return f"inputs of several parts need names: give a dict of arrays and the targets, not ({kinds})"
        return f"cannot read data of type {type(data).__name__} of {kinds}: give {FORMS}"
    return f"cannot read data of type {type(data).__name__}: give {FORMS}"
