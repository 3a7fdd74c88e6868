"""BERT (Devlin et al., 2019) that classifies sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fedveil.fields import declared
from fedveil.registry import models
from fedveil.tasks.models.transformer import Transformer
from fedveil.tasks.vocabulary import Vocabulary, text_library


@models.register("bert")
@declared
class BERT(Transformer):
    """BERT-base for sentences with classes (cola, sst2); needs fedveil[text]."""

    pieces = "wordpiece"
    entries = 30_522
    positions = 512
    causal = False

    def _fresh(self, vocabulary: Vocabulary, classes: int) -> nn.Module:
        config = text_library("transformers").BertConfig(
            vocab_size=vocabulary.size,
            pad_token_id=vocabulary.padding,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.positions,
            **self._settings(classes),
        )
        return _without_buffers(self._network(classes)(config))

    def _saved(self, *arguments: Any) -> nn.Module:
        return _without_buffers(super()._saved(*arguments))

    def _network(self, classes: int) -> Any:
        return text_library("transformers").BertForSequenceClassification

    def _settings(self, classes: int, folder: Path | None = None) -> dict[str, Any]:
        return {
            "num_labels": classes,
            "attn_implementation": "eager",
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": 0.0,
        }


def _without_buffers(network: Any) -> nn.Module:
    """Remove constants that the model gets at every call, so that clients do not share them as buffers."""
    for name in ("position_ids", "token_type_ids"):
        delattr(network.bert.embeddings, name)
    made: nn.Module = network
    return made
