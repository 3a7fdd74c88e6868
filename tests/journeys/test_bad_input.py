"""Wrong input: one line that says what would be right, a code that is not zero, and nothing written."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from .console import QUICK, SMALL, Fedveil, files, refused


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("adit",), ["'audit'"]),
        (("audit", "--defence", "clip"), ["--defense"]),
        (("audit", "--defense", "gradient-dropuot"), ["did you mean 'gradient-dropout'?"]),
        (("audit", "--attack", "inverting"), ["did you mean 'inverting-gradients'?"]),
        (("audit", "--data", "digit"), ["did you mean 'digits'?"]),
        (("audit", "--model", "lenet6"), ["did you mean 'lenet"]),
        (("audit", "--partition", "idd"), ["did you mean 'iid'?"]),
        (("audit", "--split", "owm"), ["did you mean 'own'?"]),
        (("audit", "--backend", "loops"), ["did you mean 'loop'?"]),
        (("list", "attack"), ["did you mean 'attacks'?"]),
        (("list", "clip"), ["'clip' is one of the defenses: fedveil list defenses clip"]),
        (("audit", "--model", "MLP"), ["did you mean 'mlp'?"]),
        (("audit", "--defense", "GradientDropout"), ["did you mean 'gradient-dropout'?"]),
        (("audit", "--defense", "clip,norm=2"), ["a colon stands before the fields"]),
        (("audit", "--defense", "clip norm=2"), ["a colon stands before the fields"]),
        (("audit", "--defense", "clip:norm=high"), ["norm must be a valid number (got 'high')"]),
        (("audit", "--data", "./mine"), ["image-folder:path=./mine"]),
        (("train", "--attack", "dlg"), ["--attack is an option of `fedveil audit` alone"]),
        (("audit", "--record-rounds", "1"), ["--record-rounds is an option of `fedveil train` alone"]),
        (("audit", "digits"), ["(digits): fedveil audit takes options (--data digits), see --help"]),
        (("audit", "--attack-rounds", "1-5"), ["--attack-rounds must be numbers with commas", "(got '1-5')"]),
        (("audit", "--lr-steps", "5"), ["--lr-steps must be ROUND:RATE, as in 51:0.001"]),
        (("audit", "--device", "gpu"), ["--device 'gpu' cannot be used here (there is no such kind): use cpu"]),
        (("audit", "--defense", "gradient-dropout:keep=1.5"), ["keep must be less than or equal to 1 (got 1.5)"]),
        (("audit", "--defense", "gradient-dropout:kep=0.5"), ["no field 'kep'", "fields: keep"]),
        (("audit", "--defense", "gradient-dropout:keep"), ["write name:field=value"]),
        (("audit", "--lr", "0", "--momentum", "1"), ["--lr must be greater than 0", "--momentum must be less than 1"]),
        (("audit", "--rounds", "many"), ["--rounds must be a valid integer"]),
        (("audit", "--rounds", "-1"), ["--rounds must be greater than or equal to 1"]),
        (("audit", "--out", "out", "--victims"), ["--victims", "requires an argument"]),
        (("audit", "--clients", "2000"), ["2000 clients cannot share 1293 training examples", "use fewer clients"]),
        (("audit", "--data", "mnist", "--data-root", "nowhere"), ["nowhere/mnist", "FEDVEIL_DATA"]),
        (("audit", "--config", "nowhere.toml"), ["cannot read nowhere.toml"]),
        (("audit", "--resume", "--seed", "1"), ["--out FOLDER"]),
        (("audit", "--model", "resnet18:stages=[1]"), ["no field 'stages'"]),
        (("audit", "--local-epochs", "3"), ["needs the protocol fedavg"]),
        (("report", "nowhere"), ["nowhere holds no result", "fedveil audit"]),
        (("train", "--rounds", "3", "--record-rounds", "4"), ["record_rounds must be between 1 and 3"]),
    ],
)
def test_wrong_arguments(fedveil: Fedveil, tmp_path: Path, arguments: tuple[str, ...], words: list[str]) -> None:
    refused(fedveil(*arguments), *words)
    assert files(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_missing_are_told_before_the_folder_is_taken(
    fedveil: Fedveil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "nowhere"))
    refused(fedveil("audit", *QUICK, "--lpips", "alex", "--out", "out"), "lpips needs AlexNet's ImageNet weights")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text, words",
    [
        ("seed = = 3", ["not valid TOML", "line 1"]),
        ("[federation]\nlearning_rate = 0.1", ["unknown key 'federation.learning_rate'"]),
        ("[federation]\nbatch-size = 4", ["did you mean 'federation.batch_size'?"]),
        ("[fedration]\nlr = 1", ["unknown key 'fedration': did you mean 'federation'?"]),
        ('[federation]\nrounds = "ten"', ["federation.rounds must be a valid integer"]),
        ("[federation]\nrounds = 2.5", ["federation.rounds must be a valid integer"]),
        ('[task]\nclients = "all"\n[audit]\nvictims = -1', ["task.clients must be", "audit.victims must be"]),
        ("defense = 0.5", ["defense must be"]),
    ],
)
def test_wrong_files(fedveil: Fedveil, tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    refused(fedveil("audit", "--config", "run.toml", "--out", "out"), "run.toml", *words)
    assert files(tmp_path) == ["run.toml"]


def test_a_file_that_is_no_text(fedveil: Fedveil, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    refused(fedveil("audit", "--config", "run.toml"), "not valid TOML")
    refused(fedveil("audit", "--config", "."), "cannot read")


def write_idx(path: Path, array: np.ndarray, *, cut: int = 0, magic: int | None = None) -> None:
    head = struct.pack(">I", magic if magic is not None else 0x0800 + array.ndim)
    content = head + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(content[: len(content) - cut])


def mnist(folder: Path) -> Path:
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, count in (("train", 30), ("t10k", 10)):
        write_idx(folder / f"{name}-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28)))
        write_idx(folder / f"{name}-labels-idx1-ubyte", random.integers(0, 10, count))
    return folder


def test_damaged_data_files(fedveil: Fedveil, tmp_path: Path) -> None:
    folder = mnist(tmp_path / "mnist")
    audit = ("audit", *QUICK, "--data", "mnist", "--data-root", ".", "--rounds", "0", "--out", "out", "--quiet")
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    whole, right = images.read_bytes(), labels.read_bytes()
    images.write_bytes(whole[:-100])
    refused(fedveil(*audit), str(images.name), "cut short")
    write_idx(images, np.zeros((30, 28, 28)), magic=0x12345678)
    refused(fedveil(*audit), "not an IDX file", "expected 00000803")
    images.write_bytes(whole)
    write_idx(labels, np.full(30, 11))
    refused(fedveil(*audit), "label 11 is out of range", "0 to 9")
    write_idx(labels, np.zeros(29))
    refused(fedveil(*audit), "30 images but 29 labels")
    labels.unlink()
    refused(fedveil(*audit), "train-labels-idx1-ubyte")
    assert not (tmp_path / "out").exists()
    labels.write_bytes(right)
    assert fedveil(*audit).code == 0


def test_a_folder_that_cannot_be_written_to(fedveil: Fedveil, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    refused(fedveil("audit", *QUICK, "--out", "file/below"), "cannot write to file/below", "--out")
    refused(fedveil("audit", *QUICK, "--out", "file"), "file is a file", "--out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("mine", encoding="utf-8")
    refused(fedveil("audit", *QUICK, "--out", "mine"), "holds no run of fedveil", "choose another --out")
    refused(fedveil("audit", *QUICK, "--out", "mine", "--overwrite"), "holds no run of fedveil")
    refused(fedveil("train", *QUICK[:8], "--out", "file/below"), "cannot write to")
    assert files(tmp_path) == ["file", "mine/letter.txt"]


@pytest.mark.parametrize(
    "out, words",
    [
        ("x" * 300, "File name too long"),
        ("a\0b", ""),
        ("a\nb", "cannot be shown"),
        ("link", "link is a link that leads nowhere"),
        ("link/below", "link is a link that leads nowhere"),
        ("/proc/fedveil", "cannot write to /proc/fedveil"),
    ],
    ids=["long", "nul", "line break", "broken link", "below a broken link", "read-only"],
)
def test_a_name_that_no_folder_can_have(fedveil: Fedveil, tmp_path: Path, out: str, words: str) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for command in (["audit", *QUICK], ["train", *SMALL], ["attack", "capture.safetensors"]):
        refused(fedveil(*command, "--out", out), words, "--out")
    assert list(tmp_path.iterdir()) == [tmp_path / "link"]


def test_a_report_of_something_else(fedveil: Fedveil, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}", encoding="utf-8")
    (tmp_path / "images.safetensors").write_bytes(b"")
    refused(fedveil("report", "."), "is not a fedveil result")
