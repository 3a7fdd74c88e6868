"""What the models of text share: sizes, weights from a folder, and inputs whose embeddings can be perturbed."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedveil.errors import FedveilError, one_line
from fedveil.fields import Count, Probability, declared
from fedveil.tasks.hub import saved_folder
from fedveil.tasks.inputs import Inputs
from fedveil.tasks.models.base import ModelSpec
from fedveil.tasks.text_form import IDS, MASK, OFFSET, tokens_of
from fedveil.tasks.vocabulary import Pieces, Vocabulary, text_library
from fedveil.tensors import own_memory

AT_ONCE = 256  # embeddings that are compared with the whole table at a time
BASE = (768, 12, 12)  # width, layers and heads of BERT-base and of the smallest GPT-2


@declared
class Transformer(ModelSpec):
    """Base of the models of text, which the library `transformers` builds.

    `weights` is a folder with config.json and model.safetensors, as that library writes it, or a name at its hub; the
    sizes are then the folder's, and so is the tokenizer unless the data name another. There is no dropout unless
    `dropout` says so (0.1 in the published models); attention never has any, because it would be drawn outside of the
    clients' streams.
    """

    pieces: ClassVar[Pieces]
    entries: ClassVar[int]  # of the published vocabulary
    positions: ClassVar[int]  # the most tokens of an example
    causal: ClassVar[bool | None]  # predicts each next token, while the others classify; None: as the data ask for

    width: Count = BASE[0]  # numbers for each token
    layers: Count = BASE[1]  # blocks
    heads: Count = BASE[2]  # heads of attention in each block
    dropout: Probability = 0.0  # probability that a number is dropped; 0.1 in the published models
    weights: str | None = None  # folder with config.json and model.safetensors, or its name at the Hugging Face hub
    embeddings: Literal["trained", "frozen"] = "trained"  # frozen: not trained, and no gradient of them is shared

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Not for text, which needs a vocabulary: see `build_text`."""
        raise FedveilError(f"{self.name} takes text (cola, sst2, wikitext2), not inputs of shape {shape}: try mlp")

    def build_text(self, data: str, vocabulary: Vocabulary, length: int, classes: int) -> TextModel:
        """The module for the tokens of a data set; 0 classes: running text."""
        causal = classes == 0 if self.causal is None else self.causal
        if causal != (classes == 0):
            does, holds = ("predicts text", "classes: use bert") if causal else ("classifies", "none: use gpt2")
            raise FedveilError(f"{self.name} {does}, and {data} has {holds}")
        if length > self.positions:
            raise FedveilError(f"{self.name} takes at most {self.positions} tokens, and {data} has length={length}")
        if self.weights is not None:
            network = self._saved(saved_folder(self.weights), data, vocabulary, classes, length)
        elif self.width % self.heads:
            raise FedveilError(f"{self.name}: width must be a multiple of heads (got {self.width} and {self.heads})")
        else:
            network = self._fresh(vocabulary, classes)
        if self.embeddings == "frozen":
            for module in network.modules():
                if isinstance(module, nn.Embedding):
                    module.weight.requires_grad_(False)
        return self._wrapped(network, causal=causal)

    @abstractmethod
    def _fresh(self, vocabulary: Vocabulary, classes: int) -> nn.Module:
        """The network with new weights."""

    @abstractmethod
    def _network(self, classes: int) -> Any:
        """The network's class in `transformers`."""

    @abstractmethod
    def _settings(self, classes: int, folder: Path | None = None) -> dict[str, Any]:
        """The settings of the network that override those of one saved in a folder."""

    def _wrapped(self, network: nn.Module, *, causal: bool) -> TextModel:
        """The network as a function of tokens, mask and offset."""
        return TextModel(network, causal=causal)

    def _saved(self, folder: Path, data: str, vocabulary: Vocabulary, classes: int, length: int) -> nn.Module:
        if (self.width, self.layers, self.heads) != BASE:
            raise FedveilError(f"{self.name}: weights have their own sizes: leave width, layers and heads out")
        if vocabulary.trained:
            raise FedveilError(
                f"{self.name}: weights need the tokenizer they were made with, and there is none in {folder}: name the "
                "one for the data, tokenizer=FOLDER"
            )
        if not (folder / "config.json").is_file():
            raise FedveilError(f"{self.name}: no config.json in {folder}: weights must be the folder of a saved model")
        talk = text_library("transformers.utils.logging")
        loud = talk.get_verbosity()
        talk.set_verbosity_error()  # what the folder lacks, such as a classifier, is new: no need to list it
        talk.disable_progress_bar()
        try:
            # Never the pickled weights of older folders.
            network = self._network(classes).from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, **self._settings(classes, folder)
            )
        except FedveilError:
            raise
        except Exception as error:  # whatever the library finds wrong
            raise FedveilError(
                f"{self.name}: cannot read the weights in {folder}: {one_line(error, typed=True)}"
            ) from None
        finally:
            talk.set_verbosity(loud)
        most = int(getattr(network.config, "max_position_embeddings", self.positions))
        if length > most:
            raise FedveilError(f"{self.name}: the model in {folder} takes at most {most} tokens, not length={length}")
        known = network.get_input_embeddings().num_embeddings
        if known < vocabulary.size:
            raise FedveilError(
                f"{self.name}: the weights in {folder} know {known:,} tokens, and the tokenizer has {vocabulary.size:,}"
            )
        made: nn.Module = network.float().train()
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.data = own_memory(tensor.data)
        return made


class TextModel(nn.Module):
    """A network of `transformers` as a function of tokens, mask and offset that supports `vmap`."""

    def __init__(self, network: nn.Module, *, causal: bool, first_place: int = 0) -> None:
        """The network and whether it looks back alone; `first_place` is the number that it knows the first place by."""
        super().__init__()
        self.network = network
        self.causal = causal
        self.first_place = first_place
        self._takes = frozenset(inspect.signature(network.forward).parameters)

    @property
    def width(self) -> int:
        """The length of an embedding."""
        return int(self._table().embedding_dim)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, offset: Tensor) -> Tensor:
        """Scores of the classes (B, classes), or of every next token (B, length, entries)."""
        return self.of_embeddings(self._table()(input_ids) + offset, attention_mask)

    def of_embeddings(self, embeddings: Tensor, attention_mask: Tensor) -> Tensor:
        """The same for any embeddings (B, length, width), whether they are a token's or not."""
        length = embeddings.shape[1]
        seen = attention_mask[:, None, None, :].to(embeddings.dtype)
        if self.causal:
            seen = seen * torch.ones(length, length, dtype=seen.dtype, device=seen.device).tril()
        places = self.first_place + torch.arange(length, device=embeddings.device)[None]
        kinds = None if self.causal else torch.zeros_like(attention_mask, dtype=torch.long)
        more = {"position_ids": places, "token_type_ids": kinds}
        output = self.network(
            inputs_embeds=embeddings,
            # In the form that is added to attention scores: with a plain mask, the library would branch on its values.
            attention_mask=(1 - seen) * torch.finfo(seen.dtype).min,
            **{name: value for name, value in more.items() if name in self._takes and value is not None},
        )
        scores: Tensor = output.logits
        return scores

    def _table(self) -> Any:
        return self.network.get_input_embeddings()  # type: ignore[operator]

    @property
    def table_name(self) -> str:
        """The parameter that holds the embedding of every token."""
        own = self._table().weight
        return next(name for name, parameter in self.named_parameters() if parameter is own)


def nearest_tokens(model: nn.Module, params: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """The tokens whose embeddings are nearest to the perturbed ones of some inputs, (..., places) as stored.

    It is what one reads who inverts a gradient perfectly that a data defense had taken at perturbed embeddings.
    """
    assert isinstance(model, TextModel)
    assert isinstance(inputs, dict)
    stored = tokens_of(inputs)
    offset = inputs[OFFSET]
    there = (inputs[MASK] != 0) & (offset != 0).any(-1)
    if bool(there.any()):
        table = params.get(model.table_name, dict(model.named_parameters())[model.table_name]).detach()
        moved = table[inputs[IDS][there]] + offset[there]
        parts = (moved[start : start + AT_ONCE] for start in range(0, len(moved), AT_ONCE))
        near = [torch.cdist(part[None], table[None])[0].argmin(-1) for part in parts]
        stored[there] = torch.cat(near).to(stored)
    return stored
