"""GPT-2 (Radford et al., 2019), the smallest of its sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fedveil.fields import declared
from fedveil.registry import models
from fedveil.tasks.models.transformer import Transformer
from fedveil.tasks.vocabulary import Vocabulary, text_library


@models.register("gpt2")
@declared
class GPT2(Transformer):
    """GPT-2 for running text (wikitext2): it predicts each next token; needs fedveil[text].

    The embedding table is also the output layer, so its gradient has both parts.
    """

    pieces = "byte-bpe"
    entries = 50_257
    positions = 1024
    causal = True

    def _fresh(self, vocabulary: Vocabulary, classes: int) -> nn.Module:
        config = text_library("transformers").GPT2Config(
            vocab_size=vocabulary.size,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=self.positions,
            bos_token_id=None,
            eos_token_id=None,
            **self._settings(classes),
        )
        made: nn.Module = self._network(classes)(config)
        return made

    def _network(self, classes: int) -> Any:
        return text_library("transformers").GPT2LMHeadModel

    def _settings(self, classes: int, folder: Path | None = None) -> dict[str, Any]:
        return {
            "attn_implementation": "eager",
            "use_cache": False,
            "embd_pdrop": self.dropout,
            "resid_pdrop": self.dropout,
            "attn_pdrop": 0.0,
        }
