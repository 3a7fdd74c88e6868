"""The readers of text: lines and tables, the zip archives they come in, and the tokenizers of strangers."""

from __future__ import annotations

import gzip
import json
from functools import cache, partial
from pathlib import Path

import tokenizers
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fedveil.registry import datasets
from fedveil.tasks.datasets.table import LoadedTable
from fedveil.tasks.datasets.text import LoadedText, TextPart
from fedveil.tasks.formats.zip_archive import unpack_zip
from fedveil.tasks.splits import OwnSplit
from fedveil.tasks.vocabulary import vocabulary_of
from fuzz.data_readers import one_of_them
from fuzz.mutate import any_of, damaged, json_files, odd_lines
from fuzz.reader import Files, Reader
from fuzz.structures import HUGE, zips

CELLS = (
    *(
        "",
        "0",
        "1",
        "2",
        "-1",
        "*",
        "x",
        "9" * 5000,
        "\u00b2",
        "\x00",
        "\x1b[2J",
        "\u2028",
        "a b",
        '"',
        "\ud800",
        "\t",
        "\ufeff",
    ),
    *("\ufeff", "x" * 70_000, "\r", "sentence", "label", "index", "= Title =", "<unk>"),
)
TABLES = {
    "cola": ("in_domain_train.tsv", "in_domain_dev.tsv", "out_of_domain_dev.tsv"),
    "sst2": ("train.tsv", "dev.tsv", "test.tsv"),
    "wikitext2": ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
}
LINES = {
    "cola": ("gj04\t1\t\tThey drank the pub dry.", "gj04\t0\t*\tThey drank the pub."),
    "sst2": ("sentence\tlabel", "a stirring , funny film\t1", "bad\t0"),
    "wikitext2": (" ", " = Robert <unk> = ", " ", " Robert <unk> is an English film . "),
}


def _text_files(lines: tuple[str, ...]) -> SearchStrategy[bytes]:
    odd = odd_lines(lines, CELLS, "\t").map(lambda text: text.encode("utf-8", "surrogatepass"))
    packed = st.one_of(odd, st.just(b"x" * HUGE)).map(lambda content: gzip.compress(content, mtime=0))
    return any_of(odd, odd, packed)


def _texts() -> SearchStrategy[Files]:
    choices = []
    for name, files in TABLES.items():
        valid = {f"{name}/{file}": "\n".join(LINES[name]).encode() + b"\n" for file in files}
        choices.append(one_of_them(valid, {file: partial(_text_files, LINES[name]) for file in valid}))
    return st.one_of(*choices)


def _read_text(folder: Path) -> object:
    name = next(folder.iterdir()).name
    root = folder / name if name == "wikitext2" else folder  # where its files may be as well
    data: LoadedText = datasets.build(name).load(root)
    assert data.sha256
    return data


ZIPPED = {"set/one.txt": b"x" * 600, "set/two.txt": b"y" * 20}


def _zips() -> SearchStrategy[Files]:
    contents = {name: st.sampled_from((content, content, b"", b"\0" * HUGE)) for name, content in ZIPPED.items()}
    return any_of(zips(contents)).map(lambda content: {"set.zip": content})


def _read_zip(folder: Path) -> object:
    found = unpack_zip(folder / "set.zip", folder, list(ZIPPED), limit=2 * HUGE)
    assert [path.name for path in found] == ["one.txt", "two.txt"]
    return found


@cache
def _tokenizer() -> bytes:
    """A small tokenizer with every part that BERT's has."""
    known = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab=known, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    text: str = made.to_str()
    return text.encode()


def _tokenizers() -> SearchStrategy[Files]:
    content = _tokenizer()
    return any_of(json_files(json.loads(content)), damaged(content)).map(lambda made: {"tokenizer.json": made})


def _read_tokenizer(folder: Path) -> object:
    part = TextPart(("a ab",))
    data = LoadedText("toy", part, part, (), length=8, tokenizer=folder, vocabulary=None)
    vocabulary = vocabulary_of(data, "wordpiece", 300)
    assert vocabulary.sha256
    return vocabulary.padding, vocabulary.size


TABLE = ("age,smoker,city,disease", *(f"{20 + row},{row % 2},{'ABC'[row % 3]},{row % 2}" for row in range(12)))


def _tables() -> SearchStrategy[Files]:
    lines = odd_lines(TABLE, (*CELLS, "nan", "1e999", "0x1", "1_0", '"a\nb"'), ",")
    odd = lines.map(lambda text: text.encode("utf-8", "surrogatepass"))
    packed = st.one_of(odd, st.just(b"1," * (HUGE // 2))).map(lambda content: gzip.compress(content, mtime=0))
    valid = "\n".join(TABLE).encode()
    made = any_of(odd, odd, packed, damaged(valid)).map(lambda content: {"rows.csv": content, "test.csv": valid})
    return st.one_of(made, made.map(lambda files: {"rows.csv": valid, "test.csv": files["rows.csv"]}))


def _read_table(folder: Path) -> object:
    fields = {"target": "disease", "categories": ("smoker",), "test": "test.csv", "missing": "drop"}
    data: LoadedTable = datasets.build("csv", path="rows.csv", **fields).load(folder)
    assert data.sha256
    return OwnSplit().divide(data, 0).standardized()


TEXT_READERS = (
    Reader("csv", _tables, _read_table, 1000),
    Reader("text", _texts, _read_text, 1500),
    Reader("zip", _zips, _read_zip, 600),
    Reader("tokenizer", _tokenizers, _read_tokenizer, 800),
)
