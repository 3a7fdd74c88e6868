"""A small transformer in plain torch: nothing is downloaded for it, and the library `transformers` is not needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.errors import FedveilError
from fedveil.fields import Count, declared
from fedveil.registry import models
from fedveil.tasks.models.transformer import Transformer
from fedveil.tasks.vocabulary import Vocabulary


@models.register("tiny-transformer")
@declared
class TinyTransformer(Transformer):
    """A small transformer in plain torch for sentences with classes, or for running text, which it then predicts.

    Built as BERT is: embeddings of tokens and places, normalized, then blocks of attention and two linear layers, each
    normalized behind. A sentence is classified by its first token.
    """

    pieces = "wordpiece"
    entries = 8_000
    positions = 512
    causal = None  # whatever the data ask for

    width: Count = 64  # numbers for each token
    layers: Count = 2  # blocks
    heads: Count = 2  # heads of attention in each block

    def _fresh(self, vocabulary: Vocabulary, classes: int) -> nn.Module:
        sizes = vocabulary.size, self.positions, self.width
        return TinyNetwork(sizes, self.layers, self.heads, classes, self.dropout)

    def _network(self, classes: int) -> Any:
        raise FedveilError(f"{self.name} is trained from scratch: leave weights out, or use bert or gpt2")

    def _settings(self, classes: int, folder: Path | None = None) -> dict[str, Any]:
        return {}


class TinyNetwork(nn.Module):
    """The network, called as those of `transformers` are. 0 classes: it scores every next token."""

    def __init__(self, sizes: tuple[int, int, int], layers: int, heads: int, classes: int, dropout: float) -> None:
        super().__init__()
        entries, positions, width = sizes
        self.words = nn.Embedding(entries, width)
        self.places = nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, classes or entries)
        self.classifies = classes > 0
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of tokens."""
        return self.words

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        """Scores of embeddings (B, length, width); the mask is added to the scores of attention."""
        hidden = self.drop(self.norm(inputs_embeds + self.places(position_ids)))
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        return SimpleNamespace(logits=self.head(hidden[:, 0] if self.classifies else hidden))


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Embeddings (B, length, width) to the same. Attention is spelled out: attacks take second derivatives."""

        def parted(tensor: Tensor) -> Tensor:
            batch, length, width = tensor.shape
            return tensor.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)

        query, key, value = (parted(layer(hidden)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5 + mask
        seen = torch.softmax(scores, -1) @ value
        hidden = self.first(hidden + self.drop(self.out(seen.transpose(1, 2).flatten(2))))
        made: Tensor = self.second(hidden + self.drop(self.narrow(functional.gelu(self.wide(hidden)))))
        return made
