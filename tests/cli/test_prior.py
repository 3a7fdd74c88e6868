"""`fedveil prior`: trained, shown, and used by an audit whose report names what it was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from fedveil.attacks.prior_file import Prior
from fedveil.cli.main import run
from journeys.console import refused

TRAIN = "prior train --data digits --latents 4 --epochs 1 --limit 60 --quiet --out"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDVEIL_STORE", raising=False)
    return tmp_path


def test_a_generator_is_trained_and_shown(fedveil, folder: Path) -> None:
    done = fedveil(*TRAIN.split(), "some.safetensors")
    assert done.code == 0
    assert done.out.startswith("some.safetensors: a generator of 60 training images of digits, ")
    shown = fedveil("prior", "show", "some.safetensors").out
    assert "trained on      60 training images of digits" in shown
    assert "1×8×8, 10 classes" in shown
    told = json.loads(fedveil("prior", "show", "some.safetensors", "--json").out)
    assert {name: told[name] for name in ("data", "pictures", "latents", "epochs", "seed", "shape")} == {
        "data": "digits",
        "pictures": 60,
        "latents": 4,
        "epochs": 1,
        "seed": 0,
        "shape": [1, 8, 8],
    }
    other = fedveil(*TRAIN.split(), "other.safetensors", "--part", "test", "--seed", "1")
    assert "60 test images of digits" in other.out


def test_the_same_seed_writes_the_same_generator(fedveil, folder: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        assert fedveil(*TRAIN.split(), name, "--seed", seed).code == 0
    one, two, three = (Prior.load(name).sha256 for name in ("one", "two", "three"))
    assert one == two != three


def test_bad_input_is_one_line_before_anything_is_trained(fedveil, folder: Path) -> None:
    (folder / "there").write_text("no generator", encoding="utf-8")
    refused(fedveil(*TRAIN.split(), "there"), "is there already")
    refused(fedveil(*TRAIN.split(), "none/here"), "in a folder that is there")
    refused(fedveil(*TRAIN.split(), "new", "--part", "some"), "must be train or test")
    refused(fedveil(*TRAIN.split()[:-1]), "--out")
    refused(fedveil("prior", "train", "--data", "nothing", "--out", "new"), "nothing")
    refused(fedveil(*TRAIN.split(), "new", "--limit", "9"), "at least 10 pictures")
    refused(fedveil("prior", "show", "there"), "damaged or not a fedveil prior")
    refused(fedveil("prior", "show", "nowhere"), "there is no fedveil prior at")
    assert not (folder / "new").exists()
    assert fedveil(*TRAIN.split(), "there", "--overwrite").code == 0


AUDIT = (
    "audit --data digits --model lenet --limit 60 --clients 2 --rounds 0 --victims 2 --candidates 5 --quiet "
    "--reference none --no-link --out out --store none --attack"
)
FEW = "steps=2,pixel_steps=1,polish=0"


def test_an_audit_with_a_generator_from_a_file_says_what_it_was_trained_on(fedveil, folder: Path) -> None:
    assert fedveil(*TRAIN.split(), "some.safetensors").code == 0
    assert run([*AUDIT.split(), f"latent-start:prior=some.safetensors,{FEW}"]) == 0
    result = json.loads((folder / "out/result.json").read_text(encoding="utf-8"))
    words = "a generator trained on 60 training images of digits"
    assumed = {each["switch"]: each["words"] for each in result["assumptions"]}
    assert words in assumed["brought by latent-start"]
    assert "was not checked" in assumed["brought by latent-start"]
    assert "auxiliary data" not in assumed
    assert any(words in each for each in result["not_given"])
    assert words in (folder / "out/report.html").read_text(encoding="utf-8")


def test_a_generator_of_other_pictures_is_refused_at_once(fedveil, folder: Path) -> None:
    assert fedveil(*TRAIN.split(), "some.safetensors").code == 0
    refused(fedveil(*AUDIT.split(), "gias:prior=none.safetensors"), "there is no fedveil prior at none.safetensors")
    large = AUDIT.replace("--data digits", "--data image-folder:path=pictures,size=16")
    for place, label in enumerate("ab" * 20):
        picture = folder / "pictures" / label / f"{place}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 6 * place).save(picture)
    refused(fedveil(*large.split(), f"latent-start:prior=some.safetensors,{FEW}"), "of shape (1, 8, 8)", "(3, 16, 16)")
    assert not (folder / "out/result.json").exists()
