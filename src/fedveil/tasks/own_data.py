"""The user's own data as training, validation and test examples."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, IterableDataset

from fedveil.errors import FedveilError
from fedveil.tasks.arrays import as_labels, as_tensors, is_array
from fedveil.tasks.examples import ArrayExamples, DatasetExamples, Examples
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.splits import FractionSplit, Parts, Split

FORMS = "a torch Dataset, arrays (inputs, targets), or a tuple (train, test) or (train, validation, test) of these"


def read_own_data(data: Any, normalization: Normalization | None, split: Split, seed: int) -> Parts:
    """Read one set, which is divided by the split, or a tuple of sets that are divided already."""
    if isinstance(data, Parts):
        return data
    if _is_one_set(data):
        if not isinstance(split, FractionSplit):
            raise FedveilError("your data has no parts of its own: give shares such as 70/15/15, or (train, test)")
        return split.divide_examples(_read(data, "data", normalization), seed)
    if not isinstance(data, tuple | list) or len(data) not in (2, 3) or not all(map(_is_one_set, data)):
        raise FedveilError(f"cannot read data of type {_describe(data)}: give {FORMS}")
    train = _read(data[0], "training data", normalization)
    validation = _read(data[1], "validation data", normalization) if len(data) == 3 else None
    return Parts(train, validation, _read(data[-1], "test data", normalization))


def _is_one_set(data: Any) -> bool:
    if isinstance(data, tuple | list):
        return len(data) == 2 and is_array(data[0]) and is_array(data[1])
    # Any class with __getitem__ serves as a map-style data set; an array alone has no targets.
    return isinstance(data, Examples | Dataset) or (hasattr(data, "__getitem__") and not _is_plain(data))


def _is_plain(data: Any) -> bool:
    return is_array(data) or isinstance(data, str | bytes | dict)


def _read(data: Any, what: str, normalization: Normalization | None) -> Examples:
    if isinstance(data, Examples):
        examples = data
    elif isinstance(data, tuple | list):
        inputs = as_tensors(data[0], f"the inputs of the {what}")
        labels = as_labels(data[1], f"the targets of the {what}")
        examples = ArrayExamples(inputs, labels, normalization)
    elif isinstance(data, IterableDataset):
        raise FedveilError(
            f"{type(data).__name__} can only be iterated over: give a map-style data set, with __len__ and __getitem__"
        )
    elif normalization is not None:
        raise FedveilError("a torch Dataset normalizes in its own transforms: leave normalization out, or give arrays")
    else:
        examples = DatasetExamples(data)
    if not len(examples):
        raise FedveilError(f"the {what} is empty: give at least one example")
    return examples


def _describe(data: Any) -> str:
    if isinstance(data, tuple | list):
        return f"{type(data).__name__} of {', '.join(type(part).__name__ for part in data) or 'nothing'}"
    return type(data).__name__
