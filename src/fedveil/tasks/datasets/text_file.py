"""Running text of one's own in a file: each next token is predicted."""

from __future__ import annotations

from pathlib import Path

from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.sentences import found_file
from fedveil.tasks.datasets.text import LoadedText, TextPart, TextSet
from fedveil.tasks.formats.lines import read_lines

EVERY = 10  # without a test file, the last tenth of the lines is held out


@datasets.register("text")
@declared
class TextFile(TextSet):
    """Your own running text: path=FILE. It is cut into pieces of `length` tokens; each next token is predicted.

    Without a test file the last tenth of the lines is the test part.
    """

    path: str = ""  # file of the text, from the working folder or from the data root
    test: str = ""  # file of the test text

    def read(self, root: Path | None, tokenizer: Path | None) -> LoadedText:
        """Read the file, and that of the test text if there is one."""
        path = found_file(self.name, self.path, root)
        lines = read_lines(path)
        if self.test:
            train, test = lines, read_lines(found_file(self.name, self.test, root))
        else:
            kept = len(lines) - max(1, len(lines) // EVERY)
            train, test = lines[:kept], lines[kept:]
        if not any(line.strip() for line in train) or not any(line.strip() for line in test):
            raise FedveilError(f"{path}: too little text: some of it is held out; give more, or a test file (test)")
        return LoadedText(
            name=path.name,
            train=_part(train),
            test=_part(test),
            class_names=(),
            length=self.length,
            tokenizer=tokenizer,
            vocabulary=self.vocabulary,
        )


def _part(lines: list[str]) -> TextPart:
    return TextPart(tuple(f"{line}\n" for line in lines))
