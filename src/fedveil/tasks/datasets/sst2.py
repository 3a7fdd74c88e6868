"""SST-2, the two classes of the Stanford Sentiment Treebank (Socher et al., 2013)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.text import LoadedText, TextPart, TextSet
from fedveil.tasks.formats.lines import read_class, read_lines, read_table
from fedveil.tasks.sources import find_files

HEADER = ("sentence", "label")  # of GLUE's files
UNLABELED = "index\tsentence"  # of GLUE's test file


@datasets.register("sst2")
@declared
class SST2(TextSet):
    """Sentences of film reviews, negative or positive: 6,920 + 872 + 1,821, or GLUE's 67,349 phrases + 872.

    GLUE's test labels are not public: with its files the test part is dev.tsv, and the validation part is taken from
    the training part.
    """

    class_names = ("negative", "positive")

    def read(self, root: Path | None, tokenizer: Path | None) -> LoadedText:
        """Read train.tsv, dev.tsv and test.tsv from root/sst2/, root/SST-2/ or root/text/sst2/."""
        found = find_files(self.name, root)
        dev, test = _part(found["dev.tsv"]), None
        if "test.tsv" in found and read_lines(found["test.tsv"])[0] != UNLABELED:
            test = _part(found["test.tsv"])
        return LoadedText(
            name="sst2",
            train=_part(found["train.tsv"]),
            validation=None if test is None else dev,
            test=dev if test is None else test,
            class_names=self.class_names,
            length=self.length,
            tokenizer=tokenizer,
            vocabulary=self.vocabulary,
        )


def _part(path: Path) -> TextPart:
    """Columns: sentence, label; under a header in GLUE's files."""
    rows = read_table(path, 2)
    start = int(rows[0] == HEADER)
    labels = [read_class(path, number, label, 2) for number, (_, label) in enumerate(rows[start:], 1 + start)]
    return TextPart(tuple(sentence.strip() for sentence, _ in rows[start:]), np.array(labels, dtype=np.int64))
