"""Language priors: how likely a sentence is before anything of an update is known."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.attacks.lab import Lab
from fedveil.attacks.ngram import KneserNey
from fedveil.errors import FedveilError, one_line
from fedveil.streams import Streams
from fedveil.tasks.formats.lines import read_lines
from fedveil.tasks.models.tiny_transformer import TinyNetwork
from fedveil.tasks.text_form import TextForm, tokens_of
from fedveil.tasks.vocabulary import text_library

NONE, NGRAM, SMALL = "none", "n-gram", "small"
TRAINED_HERE = (NGRAM, SMALL)  # on auxiliary sentences; any other name is that of a file or of a causal model
STEPS, BATCH, RATE = 400, 32, 3e-3  # of the small model's training
WIDTH, LAYERS, HEADS = 64, 2, 2
PACKED = ".gguf"  # a model in one file, as llama.cpp has them


class Language(Protocol):
    """Says of sentences how unlikely they are."""

    def nats(self, tokens: Tensor) -> Tensor:
        """The mean negative log likelihood of a token, over the sentences of batches (K, B, places): (K,)."""
        ...


def is_corpus(name: str) -> bool:
    """Whether this names a file of text, of which an n-gram model is made."""
    path = Path(name).expanduser()
    return name not in (NONE, *TRAINED_HERE) and path.suffix != PACKED and path.is_file()


def learned(name: str, lab: Lab) -> dict[str, Tensor]:
    """What a prior learns from auxiliary sentences, or from the lines of a file, as tensors."""
    form = lab.public.layout.text
    if name not in TRAINED_HERE and not is_corpus(name):
        return {}
    if form is None:
        raise FedveilError("a language prior is trained on sentences, and this is no text")
    if is_corpus(name):
        return KneserNey.trained(in_tokens(read_lines(Path(name).expanduser()), form), form.entries).tensors
    if lab.auxiliary is None or not len(lab.auxiliary):
        raise FedveilError(f"the language prior '{name}' is trained on auxiliary sentences, and there are none")
    sentences = [form.content(row) for row in tokens_of(lab.auxiliary.batch(range(len(lab.auxiliary)))[0])]
    if name == NGRAM:
        return KneserNey.trained(sentences, form.entries).tensors
    return trained_network(sentences, form, lab.streams)


def in_tokens(lines: Sequence[str], form: TextForm) -> list[list[int]]:
    """The lines of a text as a task's own tokens, none of which is cut."""
    tokenizer = type(form.tokenizer).from_str(form.tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found = tokenizer.encode_batch([line for line in lines if line.strip()], add_special_tokens=False)
    return [list(each.ids) for each in found]


def language_of(name: str, fitted: Mapping[str, Tensor], form: TextForm) -> Language | None:
    """The prior of this name, given what was learned."""
    if name == NONE:
        return None
    if name == NGRAM or is_corpus(name):
        return OfNgrams(KneserNey.of(fitted, form.entries), form)
    if name == SMALL:
        network = _network(form)
        network.load_state_dict(dict(fitted))
        return OfNetwork(network, form)
    return Pretrained.read(name, form)


@dataclass(frozen=True, eq=False)
class OfNgrams:
    """An n-gram model of the task's own tokens."""

    model: KneserNey
    form: TextForm

    def nats(self, tokens: Tensor) -> Tensor:
        """By the tokens that stand for text."""
        return torch.stack(
            [torch.tensor([self.model.nats(self.form.content(row)) for row in own]).mean() for own in tokens]
        )


@dataclass(frozen=True, eq=False)
class OfNetwork:
    """A small causal network of the task's own tokens. Padding begins every sentence."""

    network: TinyNetwork
    form: TextForm

    @torch.no_grad()
    def nats(self, tokens: Tensor) -> Tensor:
        """By the tokens that stand for text."""
        rows, there = padded([self.form.content(row) for row in tokens.flatten(0, -2)], self.form.padding)
        losses = token_losses(self.network, rows, there)
        means = losses.sum(1) / there[:, 1:].sum(1).clamp_min(1)
        return means.reshape(tokens.shape[:-1]).mean(-1)


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A causal model of the library transformers with its own tokenizer: it is given text."""

    network: Any
    tokenizer: Any
    form: TextForm

    @classmethod
    def read(cls, name: str, form: TextForm) -> Pretrained:
        """From a folder or a file of llama.cpp, or by a name that the library finds in its cache or on its hub."""
        library = text_library("transformers")
        path = Path(name).expanduser()
        where = str(path) if path.is_dir() else name
        packed: dict[str, Any] = {}
        if path.suffix == PACKED:
            if not path.is_file():
                raise FedveilError(f"there is no file '{name}' of a causal language model")
            _check_gguf()
            where, packed = str(path.parent), {"gguf_file": path.name}
        elif path.is_dir() and not (path / "config.json").is_file():
            raise FedveilError(f"no causal language model in '{name}': it has no config.json")
        text_library("transformers.utils.logging").disable_progress_bar()
        try:
            tokenizer = library.AutoTokenizer.from_pretrained(where, **packed)
            network = library.AutoModelForCausalLM.from_pretrained(where, **(packed or {"use_safetensors": True}))
        except Exception as error:  # whatever the library finds wrong
            raise FedveilError(f"no causal language model '{name}': {one_line(error, typed=True)}") from None
        # What was packed comes in single precision, and refuses to be asked for it.
        return cls((network if packed else network.float()).eval(), tokenizer, form)

    @torch.no_grad()
    def nats(self, tokens: Tensor) -> Tensor:
        """By the tokens of its own, the first of which is taken for granted where nothing begins a text."""
        start = self.tokenizer.bos_token_id
        begin = [] if start is None else [int(start)]
        texts = [self.form.text(row) for row in tokens.flatten(0, -2)]
        rows, there = padded([begin + self.tokenizer(text, add_special_tokens=False).input_ids for text in texts])
        scores = self.network(input_ids=rows, attention_mask=there.long()).logits
        losses = functional.cross_entropy(scores[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none") * there[:, 1:]
        means = losses.sum(1) / there[:, 1:].sum(1).clamp_min(1)
        return means.reshape(tokens.shape[:-1]).mean(-1)


def _check_gguf() -> None:
    try:
        importlib.import_module("gguf")
    except ImportError:
        raise FedveilError("a causal model in a file of llama.cpp needs the package gguf: pip install gguf") from None


def padded(sentences: list[list[int]], first: int | None = None) -> tuple[Tensor, Tensor]:
    """Sentences as rows, each behind a first token if there is one; and where there are tokens."""
    begin = [] if first is None else [first]
    rows = [torch.tensor([*begin, *sentence] or [0]) for sentence in sentences]
    made = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    sizes = torch.tensor([len(row) for row in rows])
    return made, torch.arange(made.shape[1]) < sizes[:, None]


def _network(form: TextForm) -> TinyNetwork:
    return TinyNetwork((form.entries, form.length + 1, WIDTH), LAYERS, HEADS, 0, 0.0)


def token_losses(network: TinyNetwork, rows: Tensor, there: Tensor) -> Tensor:
    """The negative log likelihood of each next token, 0 where there is none: (N, places - 1)."""
    length = rows.shape[1]
    seen = there[:, None, None, :] & torch.ones(length, length, dtype=torch.bool).tril()
    mask = (~seen) * torch.finfo(torch.float32).min
    places = torch.arange(length)[None]
    scores = network(inputs_embeds=network.words(rows), attention_mask=mask, position_ids=places).logits
    return functional.cross_entropy(scores[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none") * there[:, 1:]


def trained_network(sentences: list[list[int]], form: TextForm, streams: Streams) -> dict[str, Tensor]:
    """The weights of the small causal network after some steps of Adam on these sentences."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(int(float(streams.fold("language").uniform(1)) * 2**31))
        network = _network(form)
        weights = list(network.parameters())
        optimizer = torch.optim.Adam(weights, lr=RATE)
        for _ in range(STEPS):
            chosen = torch.randint(len(sentences), (BATCH,)).tolist()
            rows, there = padded([sentences[i] for i in chosen], form.padding)
            loss = token_losses(network, rows, there).sum() / there[:, 1:].sum().clamp_min(1)
            for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.grad = slope
            optimizer.step()
    return {name: tensor.detach() for name, tensor in network.state_dict().items()}
