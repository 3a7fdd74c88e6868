"""Division of examples into training, validation and test parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.fields import NonNegative, Positive, declared
from fedveil.registry import Registry
from fedveil.tasks.datasets.base import LoadedData, Part, pooled
from fedveil.tasks.datasets.table import LoadedTable, TablePart
from fedveil.tasks.examples import ArrayExamples, Examples, FileExamples
from fedveil.tasks.image_files import ImageFiles
from fedveil.tasks.randomness import generator
from fedveil.tasks.tables import fitted_columns
from fedveil.tasks.tokens import LoadedTokens, TokenExamples, TokenPart

Loaded = LoadedData | LoadedTokens | LoadedTable
splits = Registry("split", "fedveil.splits", "fedveil.tasks.splits")


@dataclass(frozen=True, eq=False)
class Parts:
    """The training, validation and test examples of a task."""

    train: Examples
    validation: Examples | None
    test: Examples

    def as_type(self, dtype: torch.dtype) -> Parts:
        """The same parts for a model of this floating type."""
        validation = None if self.validation is None else self.validation.as_type(dtype)
        return Parts(self.train.as_type(dtype), validation, self.test.as_type(dtype))

    def standardized(self) -> Parts:
        """The same, in which the numbers of a table are standardized by its training part."""
        if self.train.columns is None:
            return self
        others = [part for part in (self.validation, self.test) if part is not None]
        columns = fitted_columns(self.train, others)
        validation = None if self.validation is None else self.validation.with_columns(columns)
        return Parts(self.train.with_columns(columns), validation, self.test.with_columns(columns))


class Split(ABC):
    """A way to divide a data set."""

    name: ClassVar[str]

    @abstractmethod
    def divide(self, data: Loaded, seed: int) -> Parts:
        """The parts; the same seed gives the same parts."""


@splits.register("own")
@declared
class OwnSplit(Split):
    """The data set's own parts. If it has none for validation, a random `validation` share of the training part.

    The order within the training part is the data set's own.
    """

    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1  # 0: no validation part

    def divide(self, data: Loaded, seed: int) -> Parts:
        train, test = _examples(data, data.train), _examples(data, data.test)
        if data.validation is not None:
            return Parts(train, _examples(data, data.validation), test)
        if self.validation == 0:
            return Parts(train, None, test)
        kept, held_out = shuffled_parts(len(train), (1 - self.validation, self.validation), seed)
        return Parts(train.subset(kept.sort().values), train.subset(held_out.sort().values), test)


@splits.register("fractions")
@declared
class FractionSplit(Split):
    """All examples pooled, shuffled, and divided by shares: the papers' 70/15/15 and 80/10/10.

    The shares add up to 100 or to 1, so 70, 15, 15 and 0.7, 0.15, 0.15 mean the same.
    """

    train: Positive = 0.7
    validation: NonNegative = 0.15  # 0: no validation part
    test: Positive = 0.15

    def __post_init__(self) -> None:
        total = self.train + self.validation + self.test
        if not any(math.isclose(total, whole, rel_tol=1e-6) for whole in (1, 100)):
            middle = f"{self.validation:g}/" if self.validation else ""
            raise FedveilError(
                f"the split {self.train:g}/{middle}{self.test:g} adds up to {total:g}, not to 100 or 1: write "
                "70/15/15 (train/validation/test) or 80/20 (train/test)"
            )

    def divide(self, data: Loaded, seed: int) -> Parts:
        pooled_examples = _pooled(data)
        return parts_of(pooled_examples, *self.indices(len(pooled_examples), seed))

    def indices(self, size: int, seed: int, *path: str | int) -> list[Tensor]:
        """The indices, out of `size` examples, of the three parts. `path` names one draw of several."""
        return shuffled_parts(size, (self.train, self.validation, self.test), seed, *path)


def read_split(given: str | Sequence[float] | Split) -> Split:
    """A split as users write it: "own", "own:validation=0.2", "70/15/15", "80/20", or a tuple of shares.

    Two shares are train and test. They add up to 100 or to 1.

    >>> read_split("80/10/10")
    FractionSplit(train=80.0, validation=10.0, test=10.0)
    >>> read_split((0.8, 0.2))
    FractionSplit(train=0.8, validation=0.0, test=0.2)
    """
    if isinstance(given, Split):
        return given
    if isinstance(given, str) and (":" in given or "/" not in given):
        return cast(Split, splits.parse(given))
    shares: Sequence[Any] = given.split("/") if isinstance(given, str) else given
    if len(shares) not in (2, 3):
        raise FedveilError(f"cannot read the split {given}: write own, 70/15/15 (train/validation/test) or 80/20")
    return FractionSplit(train=shares[0], validation=shares[1] if len(shares) == 3 else 0.0, test=shares[-1])


def parts_of(examples: Examples, train: Tensor, validation: Tensor, test: Tensor) -> Parts:
    """The parts with the examples at these indices."""
    kept = examples.subset(validation) if len(validation) else None
    return Parts(examples.subset(train), kept, examples.subset(test))


def shuffled_parts(size: int, shares: tuple[float, ...], seed: int, *path: str | int) -> list[Tensor]:
    """The numbers 0 to size − 1 shuffled and cut by shares; a share above zero gets at least one."""
    sizes = part_sizes(size, shares)
    order = torch.from_numpy(generator(seed, "split", *path).permutation(size))
    return list(torch.split(order, sizes))


def part_sizes(size: int, shares: tuple[float, ...]) -> list[int]:
    """Integers that sum to `size`, each less than 1 from its exact share, but at least 1.

    >>> part_sizes(1797, (70, 15, 15)), part_sizes(4, (70, 15, 15))
    ([1258, 270, 269], [2, 1, 1])
    """
    wanted = sum(share > 0 for share in shares)
    if size < wanted:
        raise FedveilError(f"{size} examples cannot be divided into {wanted} parts: give more data or fewer parts")
    exact = [share * size / sum(shares) for share in shares]
    sizes = [max(int(value), 1 if value > 0 else 0) for value in exact]
    while sum(sizes) != size:
        # Largest remainder: change the part that is furthest from its share, but never to zero.
        step = 1 if sum(sizes) < size else -1
        movable = [i for i, count in enumerate(sizes) if shares[i] > 0 and count + step > 0]
        sizes[max(movable, key=lambda i: step * (exact[i] - sizes[i]))] += step
    return sizes


def _pooled(data: Loaded) -> Examples:
    if isinstance(data, LoadedTable):
        return data.examples(list(data.parts.values()))
    if isinstance(data, LoadedTokens):
        first, *others = data.parts.values()
        return TokenExamples(first.joined(others))
    return _examples(data, pooled(list(data.parts.values())))


def _examples(data: Loaded, part: Part | TokenPart | TablePart) -> Examples:
    if isinstance(data, LoadedTable):
        assert isinstance(part, TablePart)
        return data.examples([part])
    if isinstance(part, TokenPart):
        return TokenExamples(part)
    assert isinstance(part, Part)
    assert data.normalization is not None  # pictures have one
    labels = torch.from_numpy(part.labels)
    if isinstance(part.images, ImageFiles):
        return FileExamples(part.images, labels, data.normalization)
    return ArrayExamples(torch.from_numpy(part.images), labels, data.normalization)
