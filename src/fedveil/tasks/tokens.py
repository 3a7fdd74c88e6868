"""Text as a model takes it: token numbers, a mask of padding, and an offset to the embeddings.

The offset is zero. It is the part of the inputs that data defenses perturb: what they add to it is added to the
embeddings of the tokens. The embedding table is a parameter like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedveil.errors import FedveilError, one_line, printable, shortened
from fedveil.tasks.datasets.text import LoadedText, TextPart
from fedveil.tasks.examples import Examples
from fedveil.tasks.fingerprint import Fingerprint, fingerprint
from fedveil.tasks.inputs import Inputs
from fedveil.tasks.text_form import IDS, MASK, OFFSET, TextForm
from fedveil.tasks.vocabulary import Vocabulary

IGNORED = -100  # the target of padding, which does not count in the loss
PERTURBED = OFFSET
AT_ONCE = 1024  # texts to encode at a time


@dataclass(frozen=True, eq=False)
class TokenPart:
    """Token numbers (N, length), how many of each row are not padding (N,), and class numbers or None."""

    ids: NDArray[np.int32]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    width: int  # of the model's embeddings
    form: TextForm | None = None  # None where nothing was tokenized

    multi_label: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.ids)

    def joined(self, others: Sequence[TokenPart]) -> TokenPart:
        """These examples and those of other parts of the same set."""
        parts = (self, *others)
        labels = [part.labels for part in parts if part.labels is not None]
        return replace(
            self,
            ids=np.concatenate([part.ids for part in parts]),
            sizes=np.concatenate([part.sizes for part in parts]),
            labels=np.concatenate(labels) if labels else None,
        )


@dataclass(frozen=True, eq=False)
class LoadedTokens:
    """A data set of text as tokens of one vocabulary, in its own split."""

    name: str
    train: TokenPart
    test: TokenPart
    class_names: tuple[str, ...]
    vocabulary_sha256: str
    validation: TokenPart | None = None
    note: str = ""

    normalization: ClassVar[None] = None

    @property
    def parts(self) -> dict[str, TokenPart]:
        """The parts that exist, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    @cached_property
    def sha256(self) -> str:
        """The hash of the vocabulary and of all tokens and labels."""
        total = Fingerprint()
        total.add("vocabulary", torch.tensor(list(bytes.fromhex(self.vocabulary_sha256)), dtype=torch.uint8))
        for name, part in self.parts.items():
            total.add(f"{name} tokens", torch.from_numpy(part.ids))
            total.add(f"{name} sizes", torch.from_numpy(part.sizes))
            if part.labels is not None:
                total.add(f"{name} labels", torch.from_numpy(part.labels))
        return total.hexdigest()


class TokenExamples(Examples):
    """Sentences with a class each, or pieces of running text, whose targets are their own tokens."""

    def __init__(self, part: TokenPart) -> None:
        self._ids = torch.from_numpy(part.ids)
        self._sizes = torch.from_numpy(part.sizes)
        self._width = part.width
        self.text = part.form
        if part.labels is None:
            labels = self._ids.long().masked_fill(~self._mask(self._sizes), IGNORED)
        else:
            labels = torch.from_numpy(part.labels)
        self.source_sha256 = fingerprint([("tokens", self._ids), ("sizes", self._sizes), ("labels", labels)])
        super().__init__(labels)

    def _read(self, rows: Tensor) -> Inputs:
        ids = self._ids[rows].long()
        return {
            IDS: ids,
            MASK: self._mask(self._sizes[rows]).long(),
            PERTURBED: torch.zeros(*ids.shape, self._width),
        }

    def _mask(self, sizes: Tensor) -> Tensor:
        return torch.arange(self._ids.shape[1]) < sizes[:, None]


def tokenized(data: LoadedText, vocabulary: Vocabulary, width: int) -> LoadedTokens:
    """Tokenize every text, for a model whose embeddings have this width."""
    encode = _pieces if data.classes == 0 else _sentences
    form = TextForm(
        tokenizer=vocabulary.tokenizer,
        padding=vocabulary.padding,
        length=data.length,
        width=width,
        whole=data.classes > 0,
        sha256=vocabulary.sha256,
    )
    made = {name: encode(data, part, vocabulary, form) for name, part in data.parts.items()}
    cut = sum(count for _, count in made.values())
    notes = [data.note, f"{cut:,} sentences are cut at {data.length} tokens" if cut else ""]
    return LoadedTokens(
        name=data.name,
        train=made["train"][0],
        validation=made["validation"][0] if "validation" in made else None,
        test=made["test"][0],
        class_names=data.class_names,
        vocabulary_sha256=vocabulary.sha256,
        note="; ".join(note for note in notes if note),
    )


def without_tokens(data: LoadedText) -> LoadedTokens:
    """The labels alone: enough to divide sentences among clients, and it needs no vocabulary."""
    if data.classes == 0:
        raise FedveilError(f"{data.name} is running text: it has no classes, and the model's tokens set its length")

    def bare(part: TextPart) -> TokenPart:
        return TokenPart(np.zeros((len(part), 0), np.int32), np.zeros(len(part), np.int64), part.labels, 0)

    parts = {name: bare(part) for name, part in data.parts.items()}
    return LoadedTokens(
        data.name, parts["train"], parts["test"], data.class_names, data.sha256, parts.get("validation"), data.note
    )


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of every next token: scores (B, length, entries), targets (B, length)."""
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)


def next_token_losses(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of every example's next tokens, and how many there are: (B,) each."""
    wanted = targets[:, 1:]
    lost = functional.cross_entropy(scores[:, :-1].transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
    return lost.sum(1), (wanted != IGNORED).sum(1)


def next_token_hits(scores: Tensor, targets: Tensor) -> Tensor:
    """Whether each next token of the batch has the highest score, in one row."""
    counted = targets[:, 1:] != IGNORED
    return (scores[:, :-1].argmax(-1) == targets[:, 1:])[counted]


def by_frequency(targets: Tensor) -> float:
    """The perplexity of guessing every next token of targets (N, length) by its frequency among them."""
    wanted = targets[:, 1:]
    counts = torch.bincount(wanted[wanted != IGNORED]).double()
    shares = counts[counts > 0] / counts.sum()
    return float((-(shares * shares.log()).sum()).exp())


def _sentences(data: LoadedText, part: TextPart, vocabulary: Vocabulary, form: TextForm) -> tuple[TokenPart, int]:
    """One row per sentence, and how many were cut."""
    ids = np.full((len(part), data.length), vocabulary.padding, dtype=np.int32)
    sizes = np.empty(len(part), dtype=np.int64)
    vocabulary.tokenizer.no_padding()
    vocabulary.tokenizer.enable_truncation(data.length)
    cut = 0
    for start in range(0, len(part), AT_ONCE):
        found = _encoded(data, vocabulary, part.texts[start : start + AT_ONCE], ends=True)
        for index, encoding in enumerate(found, start):
            if not encoding.ids:
                raise FedveilError(f"{data.name}: the tokenizer finds no tokens in '{_quoted(part.texts[index])}'")
            sizes[index] = len(encoding.ids)
            ids[index, : len(encoding.ids)] = encoding.ids
            if encoding.overflowing and data.longer == "refuse":
                size = len(encoding.ids) + sum(len(more.ids) for more in encoding.overflowing)
                raise FedveilError(
                    f"{data.name}: '{_quoted(part.texts[index])}' has about {size} tokens, more than "
                    f"length={data.length}: use a greater length, or longer=cut"
                )
            cut += bool(encoding.overflowing)
    return TokenPart(ids, sizes, part.labels, form.width, form), cut


def _quoted(text: str) -> str:
    return shortened(printable(text), 60)


def _encoded(data: LoadedText, vocabulary: Vocabulary, texts: Sequence[str], *, ends: bool) -> list[Any]:
    try:
        found: list[Any] = vocabulary.tokenizer.encode_batch(list(texts), add_special_tokens=ends)
    except Exception as error:  # the library raises bare exceptions
        why = one_line(error, typed=True)
        raise FedveilError(f"{data.name}: the tokenizer is not one for this text: {why:.100}") from None
    return found


def _pieces(data: LoadedText, part: TextPart, vocabulary: Vocabulary, form: TextForm) -> tuple[TokenPart, int]:
    """Cut the whole text into rows and pad the last. A last row of one token is left out: it has no next token."""
    vocabulary.tokenizer.no_padding()
    vocabulary.tokenizer.no_truncation()
    stream: list[int] = []
    for start in range(0, len(part), AT_ONCE):
        for encoding in _encoded(data, vocabulary, part.texts[start : start + AT_ONCE], ends=False):
            stream += encoding.ids
    if len(stream) % data.length == 1:
        stream.pop()
    rows = -(-len(stream) // data.length)
    if not rows:
        raise FedveilError(f"{data.name}: a part has fewer than two tokens")
    ids = np.full(rows * data.length, vocabulary.padding, dtype=np.int32)
    ids[: len(stream)] = stream
    sizes = np.full(rows, data.length, dtype=np.int64)
    sizes[-1] = len(stream) - (rows - 1) * data.length
    return TokenPart(ids.reshape(rows, data.length), sizes, None, form.width, form), 0
