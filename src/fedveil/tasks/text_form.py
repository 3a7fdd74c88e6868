"""The public form of text: which tokens there are, how a sentence is laid out, and how tokens are written.

Outside of a model a sentence is one tensor of token numbers, in single precision as all that is judged, with `NO_TOKEN`
where there is none. `TextForm.inputs` makes of it what a model takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedveil.tasks.inputs import Inputs

NO_TOKEN = -1  # fills the places behind a sentence's last token
IDS, MASK, OFFSET = "input_ids", "attention_mask", "offset"


@dataclass(frozen=True, eq=False)
class TextForm:
    """What everyone knows of the text of a task: the vocabulary, and how long an example can be."""

    tokenizer: Any  # of the library `tokenizers`
    padding: int
    length: int  # places of an example
    width: int  # numbers of an embedding
    whole: bool  # sentences with special tokens at both ends; otherwise pieces of a running text
    sha256: str  # of the tokenizer

    @property
    def entries(self) -> int:
        """Tokens of the vocabulary."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return frozenset({int(number) for number, token in added if token.special} | ({self.padding} - {0}))

    @cached_property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens before every sentence and behind it: [CLS] and [SEP] of BERT."""
        if not self.whole:
            return (), ()
        bare = self.tokenizer.encode("a", add_special_tokens=False).ids
        full = self.tokenizer.encode("a").ids
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return tuple(full[:at]), tuple(full[at + len(bare) :])

    @cached_property
    def _byte_level(self) -> bool:
        return self.tokenizer.token_to_id("Ġthe") is not None or self.tokenizer.token_to_id("Ġ") is not None

    def described(self) -> dict[str, Any]:
        """What tells this form from others."""
        return {"tokenizer": self.sha256, "length": self.length, "width": self.width, "whole": self.whole}

    # ---- tensors -----------------------------------------------------------------------------------------------

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """What a model takes for sentences (..., places). The offset is zero, without memory of its own."""
        whole = tokens.round().long()
        there = whole != NO_TOKEN
        offset = torch.zeros((), device=tokens.device).expand(*tokens.shape, self.width)
        return {IDS: whole.masked_fill(~there, self.padding), MASK: there.long(), OFFSET: offset}

    def content(self, tokens: Tensor) -> list[int]:
        """The tokens of one sentence (places,) that stand for text, in their order."""
        return [int(each) for each in tokens.tolist() if each != NO_TOKEN and int(each) not in self.special]

    def laid_out(self, tokens: list[int]) -> Tensor:
        """A sentence of these tokens as a tensor (length,), cut where it is too long."""
        made = torch.full((self.length,), float(NO_TOKEN))
        kept = tokens[: self.length]
        made[: len(kept)] = torch.tensor(kept, dtype=torch.float32)
        return made

    # ---- words -------------------------------------------------------------------------------------------------

    def text(self, tokens: Tensor) -> str:
        """A sentence (places,) as it is written."""
        return str(self.tokenizer.decode(self.content(tokens), skip_special_tokens=True))

    def spelled(self, token: int) -> str:
        """One token as a part of a sentence: with a space before it where it begins a word.

        The text of "##ing" is "ing", that of "Ġthe" and "▁the" is " the".
        """
        piece = self.tokenizer.id_to_token(token) or ""
        if piece.startswith("##"):
            return piece[2:]
        if token in self.special:
            return f" {piece}"
        if self._byte_level:
            return str(self.tokenizer.decode([token], skip_special_tokens=False))
        return f" {piece.removeprefix('▁')}"


def tokens_of(inputs: Inputs) -> Tensor:
    """The sentences of a model's inputs as one tensor; inputs that are a tensor already stay as they are."""
    if isinstance(inputs, Tensor):
        return inputs
    return inputs[IDS].masked_fill(inputs[MASK] == 0, NO_TOKEN).float()
