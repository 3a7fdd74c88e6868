"""The base of data sets of text: sentences with classes, or running text, and how they become tokens."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.tasks.datasets.base import DataSet
from fedveil.tasks.hub import saved_folder

Length = Annotated[int, Field(ge=4, le=1024)]
VocabularySize = Annotated[int, Field(ge=300, le=2**20)]  # 256 bytes or the letters, and a few merges


@dataclass(frozen=True, eq=False)
class TextPart:
    """Sentences with their classes, or, without labels, the lines of a running text."""

    texts: tuple[str, ...]
    labels: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def images(self) -> tuple[str, ...]:
        """The texts, under the name that a `Part` has for its examples."""
        return self.texts


@dataclass(frozen=True, eq=False)
class LoadedText:
    """The texts of a data set in its own split, checked when made; a task turns them into its model's tokens."""

    name: str
    train: TextPart
    test: TextPart
    class_names: tuple[str, ...]  # empty: running text, in which each next token is predicted
    length: int
    tokenizer: Path | None
    vocabulary: int | None
    validation: TextPart | None = None
    note: str = ""
    longer: Literal["refuse", "cut"] = "cut"  # what becomes of sentences of more tokens than `length`

    def __post_init__(self) -> None:
        for label, part in self.parts.items():
            if not part.texts:
                raise FedveilError(f"{self.name} ({label}): no text")

    @property
    def classes(self) -> int:
        """The number of classes; 0 for running text."""
        return len(self.class_names)

    @property
    def parts(self) -> dict[str, TextPart]:
        """The parts that exist, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example: its number of tokens."""
        return (self.length,)

    @cached_property
    def sha256(self) -> str:
        """The hash of all texts and labels, independent of their files."""
        total = hashlib.sha256()
        for name, part in self.parts.items():
            total.update(f"{name}|{len(part)}|".encode())
            for text in part.texts:
                encoded = text.encode()
                total.update(f"{len(encoded)}|".encode() + encoded)
            if part.labels is not None:
                total.update(part.labels.tobytes())
        return total.hexdigest()


@declared
class TextSet(DataSet):
    """Base of the sets of text. A subclass reads its files in `read`.

    Every example has `length` tokens: longer sentences are cut, shorter ones padded, and running text is cut into
    pieces. The vocabulary is the one in the folder `tokenizer` (tokenizer.json, vocab.txt, or vocab.json and
    merges.txt), else that of a saved model; without one it is trained on the training text, with `vocabulary` entries,
    or as many as the published model has.
    """

    length: Length = 64  # tokens of an example
    tokenizer: str | None = None  # folder of a tokenizer, or its name at the hub; none: the model's, or trained here
    vocabulary: VocabularySize | None = None  # entries at most of a tokenizer that is trained here

    def load(self, root: Path | None = None) -> LoadedText:
        """Read the texts, and check that the tokenizer's folder exists."""
        if self.tokenizer is not None and self.vocabulary is not None:
            raise FedveilError(f"{self.name}: a tokenizer has its own vocabulary: leave vocabulary out")
        return self.read(root, self._folder(root))

    @abstractmethod
    def read(self, root: Path | None, tokenizer: Path | None) -> LoadedText:
        """The texts from the files under `root`."""

    def _folder(self, root: Path | None) -> Path | None:
        if self.tokenizer is None:
            return None
        try:
            return saved_folder(self.tokenizer, root)
        except FedveilError as error:
            raise FedveilError(f"{self.name}: no tokenizer: {error}") from None
