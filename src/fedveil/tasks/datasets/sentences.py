"""A list of sentences of one's own in a text file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from fedveil.errors import FedveilError, printable
from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.text import LoadedText, TextPart, TextSet
from fedveil.tasks.formats.lines import read_table
from fedveil.tasks.sources import data_root

EVERY = 5  # without a test file, every fifth sentence of each class is held out


@datasets.register("sentences")
@declared
class SentenceFile(TextSet):
    """Your own sentences with a class each: path=FILE. A line is the sentence, a tab, and the name of its class.

    Without a test file every fifth sentence of each class is the test part. A sentence of more than `length` tokens is
    refused, unless `longer` is "cut".
    """

    path: str = ""  # file of the sentences, from the working folder or from the data root
    test: str = ""  # file of the test sentences, with the same classes
    longer: Literal["refuse", "cut"] = "refuse"  # what becomes of a sentence of more than `length` tokens

    def read(self, root: Path | None, tokenizer: Path | None) -> LoadedText:
        """Read the file, and that of the test sentences if there is one."""
        path = found_file(self.name, self.path, root)
        texts, labels = _lines(path)
        classes = sorted(set(labels))
        if len(classes) < 2:
            raise FedveilError(f"{path}: all sentences have the class '{printable(classes[0])}': there must be two")
        train = _part(texts, labels, classes)
        if self.test:
            test_path = found_file(self.name, self.test, root)
            more, theirs = _lines(test_path)
            unknown = next((label for label in theirs if label not in classes), None)
            if unknown is not None:
                raise FedveilError(f"{test_path}: the class '{printable(unknown)}' is not in the training file")
            test = _part(more, theirs, classes)
        else:
            train, test = _held_out(path, train, len(classes))
        return LoadedText(
            name=path.name,
            train=train,
            test=test,
            class_names=tuple(map(printable, classes)),
            length=self.length,
            tokenizer=tokenizer,
            vocabulary=self.vocabulary,
            longer=self.longer,
        )


def found_file(name: str, given: str, root: Path | None) -> Path:
    """A file from the working folder or the data root."""
    if not given:
        raise FedveilError(f"{name}: name the file: {name}:path=FILE")
    path = Path(given).expanduser()
    for choice in (path, data_root(root) / path):
        if choice.is_file():
            return choice
    raise FedveilError(f"{name}: there is no file {path}, neither here nor in {data_root(root)}")


def _lines(path: Path) -> tuple[list[str], list[str]]:
    rows = read_table(path, 2)
    for number, (sentence, label) in enumerate(rows, 1):
        if not sentence.strip():
            raise FedveilError(f"{path}: line {number} has an empty sentence: remove it")
        if not label.strip():
            raise FedveilError(f"{path}: line {number} has no class behind its tab")
    return [sentence.strip() for sentence, _ in rows], [label.strip() for _, label in rows]


def _part(texts: list[str], labels: list[str], classes: list[str]) -> TextPart:
    return TextPart(tuple(texts), np.array([classes.index(label) for label in labels], dtype=np.int64))


def _held_out(path: Path, part: TextPart, classes: int) -> tuple[TextPart, TextPart]:
    """Every fifth sentence of each class apart from the others."""
    assert part.labels is not None
    held = np.zeros(len(part), dtype=bool)
    for label in range(classes):
        held[np.flatnonzero(part.labels == label)[EVERY - 1 :: EVERY]] = True
    if not held.any():
        raise FedveilError(f"{path}: no class has {EVERY} sentences, of which one is held out: give a test file (test)")

    def some(rows: np.ndarray) -> TextPart:
        assert part.labels is not None
        return TextPart(tuple(part.texts[row] for row in np.flatnonzero(rows)), part.labels[rows])

    return some(~held), some(held)
