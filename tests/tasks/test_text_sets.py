"""Sets of text as they are distributed: their files, what is wrong with them, and where they come from."""

from __future__ import annotations

import gzip
import hashlib
import io
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import FedveilError
from fedveil.registry import datasets
from fedveil.tasks.datasets.text import LoadedText
from fedveil.tasks.fetch import Patience, fetch
from fedveil.tasks.formats.lines import read_class, read_lines, read_table
from fedveil.tasks.formats.zip_archive import unpack_zip
from fedveil.tasks.sources import SOURCES, Remote, locate

from .web import Web, serving

Write = Callable[[dict[str, str]], Path]
COLA = {
    "in_domain_train.tsv": 'gj04\t1\t\tThe "sailors" rode the breeze.\ngj04\t0\t*\tThe bottle drank.\n',
    "in_domain_dev.tsv": "gj04\t1\t\tThe sun rose.\n",
    "out_of_domain_dev.tsv": "rhl07\t0\t*\tShe was mattered.\nrhl07\t1\t\tIt matters.\n",
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files below a folder, which it returns."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(text.encode())
        return tmp_path

    return write


def load(spec: str, root: Path) -> LoadedText:
    loaded = datasets.parse(spec).load(root)
    assert isinstance(loaded, LoadedText)
    return loaded


def test_lines_are_read_plain_and_packed(tmp_path: Path) -> None:
    content = "\ufeffone\r\n\ntwo\u2028still two\x85\n".encode()
    for name, held in (("plain", content), ("packed.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(held)
        assert read_lines(tmp_path / name) == ["one", "", "two\u2028still two\x85"]


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"),
        (b"good\nbad \xff\n", "line 2 is not UTF-8 text"),
        (b"good\ngood\nb\0d\n", "line 3 holds a zero byte"),
        (b"x" * 101, "more than the 100 bytes allowed"),
        (gzip.compress(b"x" * 101, mtime=0), "more than the 100 bytes allowed"),
        (gzip.compress(b"some text, and more", mtime=0)[:-9], "cut short"),
        (b"\x1f\x8bnot gzip", "gzip file is damaged"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(FedveilError, match=words) as refused:
        read_lines(tmp_path / "file", limit=100)
    assert "\n" not in str(refused.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FedveilError, match="cannot read"):
            read_lines(path)


@given(content=st.binary(max_size=60))
def test_any_bytes_are_rows_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-bytes"
    path.write_bytes(content)
    said = ""
    try:
        rows = read_table(path, 2)
    except FedveilError as error:
        rows, said = [], str(error)
    assert "\n" not in said
    assert all(len(row) == 2 for row in rows)


def test_rows_and_labels_are_strict(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("a\tb\nonly one\n")
    with pytest.raises(FedveilError, match="line 2 has 1 column, expected 2"):
        read_table(tmp_path / "table", 2)
    for value in ("2", "-1", "", "one", "١", "0" * 5000):
        with pytest.raises(FedveilError, match=r"line 7 has the label .*expected 0 to 1"):
            read_class(tmp_path / "table", 7, value, 2)
    assert read_class(tmp_path / "table", 7, "1", 2) == 1


@pytest.mark.parametrize("folder", ["cola", "cola_public/raw", "text/cola"])
def test_cola(write: Write, folder: str) -> None:
    data = load("cola", write({f"{folder}/{name}": text for name, text in COLA.items()}))
    assert data.train.texts == ('The "sailors" rode the breeze.', "The bottle drank.")
    assert data.train.labels is not None
    assert data.train.labels.tolist() == [1, 0]
    assert data.test.texts == ("The sun rose.", "She was mattered.", "It matters.")
    assert data.test.labels is not None
    assert data.test.labels.tolist() == [1, 0, 1]
    assert (data.validation, data.class_names) == (None, ("unacceptable", "acceptable"))


def test_sst2_in_both_forms(write: Write) -> None:
    root = write({f"sst2/{part}.tsv": f"a {part} of wit\t1\ndull\t0\n" for part in ("train", "dev", "test")})
    data = load("sst2", root)
    assert {name: part.texts[0] for name, part in data.parts.items()} == {
        "train": "a train of wit",
        "validation": "a dev of wit",
        "test": "a test of wit",
    }
    write(
        {
            "sst2/train.tsv": "sentence\tlabel\nhide new secretions \t0\n",
            "sst2/dev.tsv": "sentence\tlabel\nit 's charming \t1\n",
            "sst2/test.tsv": "index\tsentence\n0\tno label\n",
        }
    )
    glue = load("sst2", root)
    assert {name: part.texts for name, part in glue.parts.items()} == {
        "train": ("hide new secretions",),
        "test": ("it 's charming",),
    }
    assert glue.sha256 != data.sha256


def test_a_bad_label_is_told_by_its_line(write: Write) -> None:
    root = write({"sst2/train.tsv": "sentence\tlabel\nfine\t1\nbad\t3\n", "sst2/dev.tsv": "fine\t1\n"})
    with pytest.raises(FedveilError, match=r"train.tsv: line 3 has the label '3', expected 0 to 1"):
        load("sst2", root)


@pytest.mark.parametrize("name", ["wiki.{}.tokens", "wiki.{}.raw", "{}.txt"])
def test_wikitext2(write: Write, name: str) -> None:
    root = write({f"wikitext-2/{name.format(part)}": f" = {part} = \n\n" for part in ("train", "valid", "test")})
    data = load("wikitext2", root)
    assert {part: held.texts for part, held in data.parts.items()} == {
        "train": (" = train = \n", "\n"),
        "validation": (" = valid = \n", "\n"),
        "test": (" = test = \n", "\n"),
    }
    assert data.train.labels is None
    assert data.note == ""


def test_wikitext2_without_its_training_part(write: Write) -> None:
    root = write({f"wikitext-2/{part}.txt": "some text\n" for part in ("valid", "test")})
    with pytest.raises(FedveilError, match=r"no wiki.train.tokens \(or train.txt\).*wikitext2:train=valid$"):
        load("wikitext2", root)
    data = load("wikitext2:train=valid", root)
    assert list(data.parts) == ["train", "test"]
    assert "validation part is trained on" in data.note
    (root / "wikitext-2/test.txt").unlink()
    with pytest.raises(FedveilError, match=r"wikitext2: no wiki.train.tokens, wiki.test.tokens in"):
        load("wikitext2:train=valid", root)


def test_fields_that_cannot_be(write: Write) -> None:
    root = write({f"cola/{name}": text for name, text in COLA.items()})
    with pytest.raises(FedveilError, match="no tokenizer: there is no folder nowhere"):
        load("cola:tokenizer=nowhere", root)
    with pytest.raises(FedveilError, match="leave vocabulary out"):
        load(f'cola:tokenizer="{root}",vocabulary=500', root)
    with pytest.raises(FedveilError, match="length must be greater than or equal to 4"):
        load("cola:length=2", root)


def test_the_real_sets(real_data: Path) -> None:
    cola, sst2 = load("cola", real_data), load("sst2", real_data)
    wikitext2 = load("wikitext2:train=valid", real_data)
    counts = {
        data.name: {name: np.bincount(part.labels).tolist() for name, part in data.parts.items()}
        for data in (cola, sst2)
        if data.train.labels is not None
    }
    assert counts == {
        "cola": {"train": [2528, 6023], "test": [324, 719]},
        "sst2": {"train": [3310, 3610], "validation": [428, 444], "test": [912, 909]},
    }
    words = [sum(len(line.split()) for line in part.texts) for part in wikitext2.parts.values()]
    assert words == [213_886, 241_211]


@pytest.mark.parametrize("name", ["cola", "sst2", "wikitext2"])
def test_a_set_comes_out_of_its_published_archive(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES[name]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("../escape.tsv", "not asked for")
        for file in (*source.files, *source.optional):
            archive.writestr(f"{source.inside}/{file}", f"raw {file}")
            archive.writestr(f"elsewhere/{file}", "another form of it")
    content = buffer.getvalue()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Web({"set.zip": content})) as web:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        remote = Remote(f"{web.url}/set.zip", source.remotes[0].file, digest)
        changed = type(source)(**{**vars(source), "remotes": (remote,)})
        came = fetch(name, changed, tmp_path, patience=Patience(attempts=1))
    assert {path.name: path.read_text() for path in came} == {
        file: f"raw {file}" for file in (*source.files, *source.optional)
    }
    assert locate(source, tmp_path).complete
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.folders[0]]


def test_an_unusual_packing_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", compression=zipfile.ZIP_LZMA) as archive:
        archive.writestr("top/one", b"x" * 100)
    with pytest.raises(FedveilError, match="packed in an unusual way"):
        unpack_zip(tmp_path / "a.zip", tmp_path, ["top/one"])


def test_no_more_memory_is_taken_than_a_file_can_hold(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"a\n")
    (tmp_path / "packed").write_bytes(gzip.compress(b"a\n", mtime=0))
    tracemalloc.start()
    try:
        assert read_lines(tmp_path / "plain") == read_lines(tmp_path / "packed") == ["a"]
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_archives_that_cannot_be_used(tmp_path: Path) -> None:
    good = tmp_path / "good.zip"
    with zipfile.ZipFile(good, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("set/big.txt", "x" * 5000)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FedveilError, match=r"does not hold set/other.txt"):
        unpack_zip(good, out, ["set/other.txt"])
    with pytest.raises(FedveilError, match="more than 4,999 bytes"):
        unpack_zip(good, out, ["set/big.txt"], limit=4999)
    (tmp_path / "cut.zip").write_bytes(good.read_bytes()[:-30])
    with pytest.raises(FedveilError, match="cut short or damaged"):
        unpack_zip(tmp_path / "cut.zip", out, ["set/big.txt"])
