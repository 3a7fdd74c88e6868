"""Any model of the library `transformers`, by its name or from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import models
from fedveil.tasks.models.transformer import TextModel, Transformer
from fedveil.tasks.vocabulary import Vocabulary, text_library

CLOSE = 1e-3  # scores that differ by less are the same but for rounding


@models.register("huggingface")
@declared
class HuggingFace(Transformer):
    """Any saved model of transformers: weights=NAME at the hub or in its cache, or weights=FOLDER.

    Encoders classify sentences (cola, sst2), with a new classifier where the folder has none; decoders predict running
    text (wikitext2). The tokenizer is the model's own. Weights are read as safetensors; no code of others is run. A
    model that computes something else from embeddings than from tokens is refused.
    """

    pieces = "wordpiece"
    entries = 30_522
    positions = 2**20  # as many as the saved model says
    causal = None

    def _fresh(self, vocabulary: Vocabulary, classes: int) -> nn.Module:
        raise FedveilError(f"{self.name}: name a saved model: {self.name}:weights=NAME, or a folder")

    def _network(self, classes: int) -> Any:
        kind = "AutoModelForSequenceClassification" if classes else "AutoModelForCausalLM"
        return getattr(text_library("transformers"), kind)

    def _settings(self, classes: int, folder: Path | None = None) -> dict[str, Any]:
        config = text_library("transformers").AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        for name, value in config.to_dict().items():
            if isinstance(value, int | float) and ("drop" in name or "pdrop" in name) and "layer" not in name:
                setattr(config, name, 0.0 if "att" in name else self.dropout)
        if classes:
            config.num_labels = classes
        else:
            config.use_cache = False
        return {"config": config, "attn_implementation": "eager", "trust_remote_code": False}

    def _wrapped(self, network: nn.Module, *, causal: bool) -> TextModel:
        """The way to call this network by embeddings that gives what its tokens give."""
        _constant_buffers(network)
        padding = getattr(network.config, "pad_token_id", None)
        was, tokens = network.training, torch.tensor([[5, 6, 7, 8], [9, 6, 5, padding or 0]])
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
        network.eval()
        try:
            with torch.no_grad():
                wanted = network(input_ids=tokens, attention_mask=mask).logits
                for first in dict.fromkeys((0, (padding or 0) + 1, 2)):
                    made = TextModel(network, causal=causal, first_place=first)
                    found = made(tokens, mask, torch.zeros(*tokens.shape, made.width))
                    kept = mask.bool() if causal else slice(None)
                    if bool(((found - wanted)[kept].abs() < CLOSE * (1 + wanted[kept].abs())).all()):
                        return made
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise FedveilError(f"{self.name}: {self.weights} cannot be called by embeddings: {error!s:.80}") from None
        finally:
            network.train(was)
        raise FedveilError(f"{self.name}: {self.weights} computes something else from embeddings than from tokens")


def _constant_buffers(network: nn.Module) -> None:
    """Make what is never saved a plain attribute, so that clients do not share it as buffers."""
    for module in network.modules():
        for name in [name for name in module._buffers if name in module._non_persistent_buffers_set]:
            value = module._buffers.pop(name)
            module._non_persistent_buffers_set.discard(name)
            setattr(module, name, value)
