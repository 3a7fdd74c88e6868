"""Vocabularies: read from the folder of a tokenizer, or trained on the training text and cached."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedveil.errors import FedveilError, one_line
from fedveil.files import write_atomically
from fedveil.tasks.cache import cache_folder
from fedveil.tasks.datasets.text import LoadedText

log = logging.getLogger("fedveil")

Pieces = Literal["wordpiece", "byte-bpe"]  # BERT's, GPT-2's
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GPT2_SPECIAL = ("<|endoftext|>",)
PADDING = ("[PAD]", "<pad>", "<|pad|>")
FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer of the library `tokenizers`."""

    tokenizer: Any
    trained: bool  # on the training text; otherwise it came from a folder
    pad: int | None = None  # the token that fills short sentences, if there is one

    @property
    def size(self) -> int:
        """The number of entries, including special ones."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def padding(self) -> int:
        """The token that fills short pieces; 0 if there is none, since padding is masked anyway."""
        return self.pad or 0

    @property
    def sha256(self) -> str:
        """The hash of the whole tokenizer."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()


def vocabulary_of(data: LoadedText, pieces: Pieces, size: int, saved: Path | None = None) -> Vocabulary:
    """The vocabulary in the data's tokenizer folder, or in that of a `saved` model.

    Without either, one of at most `size` entries is trained on the training text.
    """
    folder = data.tokenizer
    if folder is None and saved is not None:
        if data.vocabulary is not None:
            raise FedveilError(f"{data.name}: a saved model has a vocabulary of its own: leave vocabulary out")
        folder = saved if _there(saved) else None
    if folder is None:
        made = _trained(data.train.texts, pieces, data.vocabulary or size)
        return Vocabulary(made, trained=True, pad=_padding(made))
    found = _from_folder(folder)
    pad = _padding(found, folder)
    if pad is None and data.classes:
        raise FedveilError(
            f"{data.name}: the tokenizer in {folder} has no padding token, which fills short sentences: name it in its "
            "tokenizer_config.json (pad_token)"
        )
    return Vocabulary(found, trained=False, pad=pad)


def _padding(tokenizer: Any, folder: Path | None = None) -> int | None:
    """The number of the padding token: as the tokenizer says itself, or its folder, or by its usual names."""
    own = tokenizer.padding
    if own is not None and tokenizer.id_to_token(int(own["pad_id"])) is not None:
        return int(own["pad_id"])
    files = ("tokenizer_config.json", "special_tokens_map.json")
    named = [] if folder is None else [_pad_token(folder / name) for name in files]
    numbers = (tokenizer.token_to_id(name) for name in (*named, *PADDING) if name)
    return next((int(number) for number in numbers if number is not None), None)


def _there(folder: Path) -> set[str]:
    return {name for name in FILES if (folder / name).is_file()}


def _pad_token(path: Path) -> str | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("pad_token")
    except (OSError, ValueError, AttributeError):
        return None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def text_library(name: str) -> Any:
    """The library `tokenizers`, `transformers` or `rouge_score`, or a module in it: only text needs these."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise FedveilError(f'text needs the package {package}: pip install "fedveil[text]"') from None


def _from_folder(folder: Path) -> Any:
    """Read tokenizer.json, or through transformers the older vocab.txt (BERT) or vocab.json and merges.txt (GPT-2)."""
    library = text_library("tokenizers")
    there = _there(folder)
    try:
        if "tokenizer.json" in there:
            return library.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if "vocab.txt" in there:
            made = text_library("transformers").BertTokenizerFast.from_pretrained(str(folder), local_files_only=True)
            return made.backend_tokenizer
        if {"vocab.json", "merges.txt"} <= there:
            made = text_library("transformers").GPT2TokenizerFast.from_pretrained(str(folder), local_files_only=True)
            return made.backend_tokenizer
    except FedveilError:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise FedveilError(f"cannot read the tokenizer in {folder}: {one_line(error, typed=True)}") from None
    raise FedveilError(f"no tokenizer in {folder}: it has no tokenizer.json, vocab.txt, or vocab.json and merges.txt")


def _trained(texts: Sequence[str], pieces: Pieces, size: int) -> Any:
    """Train a tokenizer, or take it from the cache; the same texts give the same vocabulary."""
    library = text_library("tokenizers")
    key = hashlib.sha256(f"{pieces}|{size}|{library.__version__}|{len(texts)}|".encode())
    for text in texts:
        encoded = text.encode()
        key.update(f"{len(encoded)}|".encode() + encoded)
    path = cache_folder() / "vocabularies" / f"{key.hexdigest()[:32]}.json"
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # not cached yet, or damaged: the library raises bare exceptions
        log.debug("the vocabulary is trained: %s", one_line(error, typed=True))
    made = _wordpiece(library, texts, size) if pieces == "wordpiece" else _byte_bpe(library, texts, size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, made.to_str().encode())
    except (OSError, FedveilError) as error:
        log.info("the vocabulary is not kept: %s", error)
    return made


def _wordpiece(library: Any, texts: Sequence[str], size: int) -> Any:
    """Like BERT's uncased one: lower case, words and punctuation apart, [CLS] before and [SEP] after a sentence.

    The trainer numbers the letters inside of words in the order of a hash table that differs from run to run, and of
    two equally frequent pairs it merges the one with the lower numbers. These letters are therefore given from the
    start, sorted, so that the same text always gives the same vocabulary.
    """
    normalizer = library.normalizers.BertNormalizer(lowercase=True)
    letters = sorted({letter for text in texts for letter in normalizer.normalize_str(text) if not letter.isspace()})

    def empty(**known: Any) -> Any:
        made = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]", **known))
        made.normalizer = normalizer
        made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        made.decoder = library.decoders.WordPiece()
        return made

    trainer = library.trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*BERT_SPECIAL, *(f"##{letter}" for letter in letters)],
        limit_alphabet=len(letters),
        show_progress=False,
    )
    found = empty()
    found.train_from_iterator(texts, trainer)
    made = empty(vocab=found.get_vocab())
    made.add_special_tokens([*BERT_SPECIAL])
    ends = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = library.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return made


def _byte_bpe(library: Any, texts: Sequence[str], size: int) -> Any:
    """Like GPT-2's: merged pairs of bytes, so that any text can be encoded."""
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*GPT2_SPECIAL],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made
