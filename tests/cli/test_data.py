from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedveil.registry import datasets
from fedveil.tasks.sources import SOURCES, Remote, Source
from journeys.console import refused

PROBE = """
import sys
from fedveil.cli.main import run
code = run(sys.argv[1:])
heavy = sorted(name for name in ("torch", "sklearn", "scipy", "numpy", "PIL") if name in sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


def breast(folder: Path, labels: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    held = {}
    for part, count in (("train", 9), ("val", 3), ("test", 4)):
        held[f"{part}_images"] = np.arange(count * 784, dtype=np.uint8).reshape(count, 28, 28)
        held[f"{part}_labels"] = np.arange(count, dtype=np.uint8)[:, None] % labels
    np.savez_compressed(folder / "breastmnist.npz", **held)
    return folder / "breastmnist.npz"


def test_the_list_comes_without_torch(tmp_path: Path) -> None:
    arguments = ["data", "list", "--data-root", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(datasets.entries())


def test_the_list_says_what_is_there_and_what_is_missing(fedveil, tmp_path: Path) -> None:
    breast(tmp_path / "medmnist")
    rows = {row["name"]: row for row in json.loads(fedveil("data", "list", "--json", "--data-root", tmp_path).out)}
    assert rows["breastmnist"] == {"name": "breastmnist", "state": "there", "where": str(tmp_path / "medmnist")}
    assert rows["cifar100"]["state"] == "missing"
    assert rows["cifar100"]["where"].startswith(f"train, test, meta in {tmp_path / 'cifar-100-python'}: `fedveil data")
    assert "nihcc" in rows["nih-chestxray"]["where"]
    assert rows["digits"]["state"] == "-"
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "test_batch").touch()
    (tmp_path / "cifar10" / "data_batch_2").touch()
    shown = fedveil("data", "list", "--data-root", tmp_path).out
    assert f"{tmp_path / 'cifar10'} (without data_batch_1, data_batch_3, data_batch_4, data_batch_5)" in shown


def test_check_reads_what_is_there(fedveil, tmp_path: Path) -> None:
    path = breast(tmp_path)
    said = fedveil("data", "check", "--data-root", tmp_path)
    assert said.code == 0
    assert said.out.splitlines() == [
        "breast-cancer: sound: 456 + 113 rows of 30 columns",
        "breastmnist: sound: 9 + 3 + 4 images, 1×28×28, not byte for byte the published files",
        "digits: sound: 1,437 + 360 images, 1×8×8",
    ]
    path.write_bytes(path.read_bytes()[:-100])
    said = fedveil("data", "check", "--data-root", tmp_path)
    assert said.code == 2
    assert said.out.splitlines()[1].startswith(f"breastmnist: {path}: cut short or damaged")
    assert said.err == "fedveil: 1 of 3 data sets cannot be used: breastmnist\n"


def test_check_of_a_named_set_that_is_missing(fedveil, tmp_path: Path) -> None:
    said = fedveil("data", "check", "mnist", "--data-root", tmp_path)
    assert said.code == 2
    assert said.out.startswith("mnist: no train-images-idx3-ubyte.gz")
    breast(tmp_path, labels=3)
    assert "label 2 is out of range" in fedveil("data", "check", "breastmnist", "--data-root", tmp_path).out


def test_fetch(fedveil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.web import Web, serving

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    content = breast(tmp_path / "elsewhere").read_bytes()
    with serving(Web({"breastmnist.npz": content})) as web:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        remote = Remote(f"{web.url}/breastmnist.npz?download=1", "breastmnist.npz", digest)
        source = Source(("medmnist", "."), ("breastmnist.npz",), (remote,))
        monkeypatch.setitem(SOURCES, "breastmnist", source)
        root = tmp_path / "root"
        said = fedveil("data", "fetch", "breastmnist", "digits", "--data-root", root)
        assert (said.code, said.err) == (0, "")
        assert said.out.splitlines() == [
            f"breastmnist: 1 file in {root / 'medmnist'}",
            "digits: nothing to download: comes with scikit-learn",
        ]
        assert fedveil("data", "fetch", "breastmnist", "--data-root", root).out.startswith("breastmnist: was there")
        assert len(web.asked) == 1
    assert "files as published" in fedveil("data", "check", "breastmnist", "--data-root", root).out


def test_wrong_names_and_sets_without_a_source_get_one_line(fedveil, tmp_path: Path) -> None:
    refused(fedveil("data"), "Missing command")
    refused(fedveil("data", "fetch", "cifar"), "unknown data set 'cifar'", "cifar10")
    refused(fedveil("data", "check", "mnits"), "did you mean 'mnist'")
    refused(fedveil("data", "fetch", "nih-chestxray", "--data-root", tmp_path), "no source with a published checksum")


# ---- who holds what ----------------------------------------------------------------------------------


def test_show_prints_counts_that_add_up(fedveil) -> None:
    said = fedveil("data", "show", "digits", "--clients", "3", "--partition", "dirichlet:alpha=0.3", "--limit", "200")
    assert (said.code, said.err) == (0, "")
    head, *rows = said.out.partition("\n\n")[0].splitlines()
    assert head.split() == ["label", "client", "0", "1", "2", "all"]
    table = np.array([[int(n.replace(",", "")) for n in row.split()[1:]] for row in rows])
    assert [row.split()[0] for row in rows] == [*map(str, range(10)), "all"]
    assert (table[:-1].sum(0) == table[-1]).all()
    assert (table[:, :-1].sum(1) == table[:, -1]).all()
    assert table[-1, -1] == 200
    assert f"smallest and largest client   {min(table[-1, :-1])} and {max(table[-1, :-1])}" in said.out


def test_show_counts_what_a_task_of_the_same_settings_holds(fedveil) -> None:
    from fedveil.tasks.task import label_table, task

    given = ("--clients", "5", "--partition", "shards", "--split", "70/15/15", "--seed", "3", "--json")
    told = json.loads(fedveil("data", "show", "digits", *given).out)
    made = task("digits", model="mlp", clients=5, partition="shards", split="70/15/15", seed=3)
    assert told["counts"] == label_table(made)
    assert told["sizes"] == [len(places) for places in made.clients]
    assert (told["data"], told["partition"]) == ("digits", "shards")
    assert 0 < told["distance_by_chance"] < told["distance"] < 1


def test_show_turns_the_table_or_leaves_it_out_where_it_does_not_fit(fedveil, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    turned = fedveil("data", "show", "digits", "--clients", "30").out.splitlines()
    assert turned[0].split() == ["client", "label", *map(str, range(10)), "all"]
    assert [line.split()[0] for line in turned[1:32]] == [*map(str, range(30)), "all"]
    assert max(map(len, turned)) <= 80
    many = fedveil("data", "show", "digits", "--clients", "300").out
    assert many.startswith("clients  ")
    assert "Too many for a table here" in many


def test_show_counts_every_label_of_an_example(fedveil, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    held = {}
    for part, count in (("train", 9), ("val", 3), ("test", 4)):
        held[f"{part}_images"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        held[f"{part}_labels"] = random.integers(0, 2, (count, 14), dtype=np.uint8)
    np.savez_compressed(tmp_path / "chestmnist.npz", **held)
    told = json.loads(fedveil("data", "show", "chestmnist", "--clients", "2", "--data-root", tmp_path, "--json").out)
    assert told["several"]
    assert np.sum(told["counts"], 0).tolist() == held["train_labels"].sum(0).tolist()
    shown = fedveil("data", "show", "chestmnist", "--clients", "2", "--data-root", tmp_path).out.splitlines()
    assert shown[1].split()[0] == "atelectasis"
    assert shown[15].split() == ["examples", "5", "4", "9"]


@pytest.mark.parametrize("name", ["held.html", "new/folder/held.svg"])
def test_show_draws(fedveil, tmp_path: Path, name: str) -> None:
    said = fedveil("data", "show", "digits", "--out", tmp_path / name)
    assert said.out.endswith(f"The picture is {tmp_path / name}\n")
    assert "1,293" in (tmp_path / name).read_text(encoding="utf-8") or name.endswith("svg")
    assert "<title>How the labels lie over the clients</title>" in (tmp_path / name).read_text(encoding="utf-8")


def test_show_refuses_in_one_line(fedveil, tmp_path: Path) -> None:
    refused(fedveil("data", "show", "digit"), "unknown data set 'digit': did you mean 'digits'")
    refused(fedveil("data", "show", "digits", "--clients", "0"), "--clients", "got 0")
    refused(fedveil("data", "show", "digits", "--clients", "9999"), "9999 clients cannot share 1293")
    refused(fedveil("data", "show", "digits", "--partition", "dirichlet:alpha=0"), "alpha")
    refused(fedveil("data", "show", "digits", "--out", tmp_path / "a.png"), "a.png", ".html or .svg")
    refused(fedveil("data", "show", "mnist", "--data-root", tmp_path), "no train-images")


def test_show_spells_out_what_a_terminal_would_act_upon(fedveil, tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a\x1b[2Jcat", "b\ndog", "c\u202etac"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (8, 8), number).save(tmp_path / "pictures" / name / f"{number}.png")
    said = fedveil("data", "show", "image-folder:path=pictures,size=8,channels=1", "--clients", "1")
    assert said.code == 0, said.err
    assert [line.split()[0] for line in said.out.splitlines()[1:4]] == ["a\\x1b[2Jcat", "b", "c\\u202etac"]
    assert all(character.isprintable() for character in said.out.replace("\n", ""))
