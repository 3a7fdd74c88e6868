"""CoLA, the Corpus of Linguistic Acceptability (Warstadt, Singh, Bowman, 2019)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.text import LoadedText, TextPart, TextSet
from fedveil.tasks.formats.lines import read_class, read_table
from fedveil.tasks.sources import find_files


@datasets.register("cola")
@declared
class CoLA(TextSet):
    """English sentences, acceptable or not, 8,551 + 1,043.

    Its test labels are not public: the test part here is the in-domain and the out-of-domain development part, as in
    GLUE.
    """

    class_names = ("unacceptable", "acceptable")

    def read(self, root: Path | None, tokenizer: Path | None) -> LoadedText:
        """Read the raw files from root/cola/, root/cola_public/raw/ or root/text/cola/."""
        found = find_files(self.name, root)
        train, *tests = (
            _part(found[f"{stem}.tsv"]) for stem in ("in_domain_train", "in_domain_dev", "out_of_domain_dev")
        )
        return LoadedText(
            name="cola",
            train=train,
            test=_joined(tests),
            class_names=self.class_names,
            length=self.length,
            tokenizer=tokenizer,
            vocabulary=self.vocabulary,
        )


def _part(path: Path) -> TextPart:
    """Columns: source, label, the author's mark, sentence."""
    rows = read_table(path, 4)
    labels = [read_class(path, number, row[1], 2) for number, row in enumerate(rows, 1)]
    return TextPart(tuple(row[3] for row in rows), np.array(labels, dtype=np.int64))


def _joined(parts: list[TextPart]) -> TextPart:
    labels = [part.labels for part in parts if part.labels is not None]
    return TextPart(tuple(text for part in parts for text in part.texts), np.concatenate(labels))
