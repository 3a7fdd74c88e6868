"""WikiText-2 (Merity et al., 2016)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.text import LoadedText, TextPart, TextSet
from fedveil.tasks.formats.lines import read_lines
from fedveil.tasks.sources import SOURCES, find_files, locate

TRAIN = "wiki.train.tokens"


@datasets.register("wikitext2")
@declared
class WikiText2(TextSet):
    """Articles of Wikipedia as running text, 2.1 + 0.2 + 0.2 million words: each next token is predicted.

    The text is cut into pieces of `length` tokens. If the training file is missing, `train="valid"` trains on the
    validation part instead.
    """

    train: Literal["train", "valid"] = "train"  # which part to train on

    def read(self, root: Path | None, tokenizer: Path | None) -> LoadedText:
        """Read wiki.{train,valid,test}.tokens (or .raw), or {train,valid,test}.txt, from root/wikitext-2/."""
        there = locate(SOURCES[self.name], root)
        if there.missing == (TRAIN,) and self.train == "train":
            raise FedveilError(
                f"wikitext2: no {TRAIN} (or train.txt) in {there.folder}: get it with `fedveil data fetch wikitext2`, "
                "or train on the validation part with wikitext2:train=valid"
            )
        found = there.found if there.missing == (TRAIN,) else find_files(self.name, root)
        return LoadedText(
            name="wikitext2",
            train=_part(found[f"wiki.{self.train}.tokens"]),
            validation=_part(found["wiki.valid.tokens"]) if self.train == "train" else None,
            test=_part(found["wiki.test.tokens"]),
            class_names=(),
            length=self.length,
            tokenizer=tokenizer,
            vocabulary=self.vocabulary,
            note="" if self.train == "train" else "the validation part is trained on, in place of the training part",
        )


def _part(path: Path) -> TextPart:
    return TextPart(tuple(f"{line}\n" for line in read_lines(path)))
