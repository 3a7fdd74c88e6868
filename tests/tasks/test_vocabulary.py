"""Vocabularies: the same text gives the same one; they come from folders too."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import tokenizers

from fedveil.errors import FedveilError
from fedveil.tasks.datasets.text import LoadedText, TextPart
from fedveil.tasks.tokens import tokenized
from fedveil.tasks.vocabulary import Pieces, Vocabulary, vocabulary_of

PUBLISHED: dict[Pieces, int] = {"wordpiece": 30_522, "byte-bpe": 50_257}


def text(lines: tuple[str, ...], tokenizer: Path | None = None, size: int | None = None, length: int = 8) -> LoadedText:
    part = TextPart(lines)
    return LoadedText("own", part, part, (), length, tokenizer, size)


def words(count: int, seed: int = 0) -> tuple[str, ...]:
    drawn = random.Random(seed)
    return tuple(
        " ".join("".join(drawn.choices("abcdefghij", k=drawn.randint(1, 7))) for _ in range(8)) for _ in range(count)
    )


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "cache"))


def kept() -> list[Path]:
    return sorted((Path(os.environ["FEDVEIL_CACHE"]) / "vocabularies").glob("*.json"))


@pytest.mark.parametrize("pieces", PUBLISHED)
def test_the_same_text_gives_the_same_vocabulary(pieces: Pieces) -> None:
    found = set()
    for _ in range(4):
        found.add(vocabulary_of(text(words(60), size=400), pieces, PUBLISHED[pieces]).sha256)
        for path in kept():
            path.unlink()
    assert len(found) == 1
    assert vocabulary_of(text(words(60, seed=1), size=400), pieces, PUBLISHED[pieces]).sha256 not in found


@pytest.mark.parametrize("pieces", PUBLISHED)
def test_it_is_kept_by_its_content(pieces: Pieces) -> None:
    first = vocabulary_of(text(words(20)), pieces, PUBLISHED[pieces])
    (path,) = kept()
    path.write_text("damaged")
    again = vocabulary_of(text(words(20)), pieces, PUBLISHED[pieces])
    assert (again.sha256, again.trained) == (first.sha256, True)
    # What is kept is what is used: another vocabulary under this name is taken.
    path.write_text(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str())
    assert vocabulary_of(text(words(20)), pieces, PUBLISHED[pieces]).size == 1
    vocabulary_of(text(words(20), size=300), pieces, PUBLISHED[pieces])
    assert len(kept()) == 2


def test_the_pieces_are_those_of_the_published_models() -> None:
    bert = vocabulary_of(text(("The river, the RIVER bank.", "rivers")), "wordpiece", 100).tokenizer
    assert bert.encode("The RIVER , river !").tokens == ["[CLS]", "the", "river", ",", "river", "[UNK]", "[SEP]"]
    assert [bert.token_to_id(token) for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]
    gpt2 = vocabulary_of(text(("The river, the RIVER bank.\n",)), "byte-bpe", 300).tokenizer
    for line in ("The river", "ω — never seen\n", ""):
        assert gpt2.decode(gpt2.encode(line).ids) == line


@pytest.mark.parametrize("saved", ["tokenizer.json", "vocab.txt", "vocab.json"])
def test_a_folder_of_a_tokenizer(tmp_path: Path, saved: str) -> None:
    lines = ("the river bank", "the bank")
    pieces: Pieces = "byte-bpe" if saved == "vocab.json" else "wordpiece"
    trained = vocabulary_of(text(lines), pieces, 400).tokenizer
    if saved == "tokenizer.json":
        trained.save(str(tmp_path / saved))
    elif saved == "vocab.txt":
        entries = sorted(trained.get_vocab().items(), key=lambda item: item[1])
        (tmp_path / saved).write_text("".join(f"{token}\n" for token, _ in entries))
    else:
        trained.model.save(str(tmp_path))
    found = vocabulary_of(text(lines, tokenizer=tmp_path), pieces, 400)
    assert not found.trained
    assert found.tokenizer.encode("the river").ids == trained.encode("the river").ids


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match="no tokenizer in"):
        vocabulary_of(text(("a",), tokenizer=tmp_path), "wordpiece", 100)
    (tmp_path / "tokenizer.json").write_text('{"not": "one"}')
    with pytest.raises(FedveilError, match="cannot read the tokenizer in") as refused:
        vocabulary_of(text(("a",), tokenizer=tmp_path), "wordpiece", 100)
    assert "\n" not in str(refused.value)


def test_without_the_library_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(FedveilError, match=r'text needs the package tokenizers: pip install "fedveil\[text\]"$'):
        vocabulary_of(text(("a",)), "wordpiece", 100)


def test_running_text_is_cut_and_nothing_of_it_is_lost() -> None:
    lines = tuple(f"{line}\n" for line in words(9))
    vocabulary = vocabulary_of(text(lines), "byte-bpe", 300)
    whole = vocabulary.tokenizer.encode("".join(lines)).ids
    part = tokenized(text(lines, length=7), vocabulary, 4).train
    found = [token for row, size in zip(part.ids, part.sizes, strict=True) for token in row[:size].tolist()]
    assert found == whole[: len(found)]
    assert len(whole) - len(found) in (0, 1)  # one token alone has no next one
    assert (part.sizes[:-1] == 7).all()
    with pytest.raises(FedveilError, match="fewer than two tokens"):
        tokenized(text(("a",), length=7), vocabulary, 4)


def test_sentences_are_cut_or_padded_and_the_note_says_so() -> None:
    vocabulary = vocabulary_of(text(("a b c d e f g h i j",)), "wordpiece", 100)
    part = TextPart(("a", "a b c d e f g h i j"))
    data = LoadedText("own", part, part, ("no", "yes"), 6, None, None, note="a first note")
    made = tokenized(data, Vocabulary(vocabulary.tokenizer, trained=True), 4)
    assert made.train.sizes.tolist() == [3, 6]
    assert made.train.ids[0, 3:].tolist() == [0, 0, 0]
    assert made.train.ids[1, [0, -1]].tolist() == [2, 3]  # [CLS] and [SEP] stay
    assert made.note == "a first note; 2 sentences are cut at 6 tokens"
