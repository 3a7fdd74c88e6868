"""Train, capture, attack what was captured."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from PIL import Image

import fedveil as fv
from fedveil.cli import attack as cli_attack
from fedveil.federation.capture import Capture, Truth
from fedveil.tasks.models.mlp import MLP

from .console import SMALL, Fedveil, files, refused

RECORD = (*SMALL, "--rounds", "2", "--batch-size", "2", "--record-rounds", "1", "--quiet", "--out", "run")
QUICK = ("--attack", "inverting-gradients:steps=5", "--quiet")


@pytest.fixture
def trained(fedveil: Fedveil, tmp_path: Path) -> Path:
    said = fedveil("train", *RECORD, "--defense", "gradient-dropout")
    assert said.code == 0, said.err
    assert "Captured updates: 2 in run/captures" in said.out
    return tmp_path / "run"


def test_training_leaves_a_model_a_history_and_captures(fedveil: Fedveil, trained: Path) -> None:
    captures = ["round-0001-client-0000.safetensors", "round-0001-client-0001.safetensors"]
    assert files(trained) == [
        *(f"captures/{name}" for name in captures),
        "checkpoint.safetensors",
        "config.toml",
        "history.json",
        "model.safetensors",
        *(f"truths/{name}" for name in captures),
    ]
    history = json.loads((trained / "history.json").read_text(encoding="utf-8"))
    assert [record["round"] for record in history["history"]] == [1, 2]
    model = MLP(hidden=(16,)).build((1, 8, 8), 10)
    model.load_state_dict(safetensors.torch.load_file(trained / "model.safetensors"))
    task = fv.task("digits", model=model, limit=120)  # as SMALL has it
    inputs, targets = task.test.batch(range(len(task.test)))
    accuracy = float((model(inputs).argmax(1) == targets).float().mean())
    assert accuracy == pytest.approx(history["utility"]["test"], abs=1e-6)


def test_an_attack_that_was_stopped_while_it_saved_is_made_again(
    fedveil: Fedveil, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = cli_attack._save_png
    saved: list[Path] = []

    def stops(path: Path, picture: Any) -> None:
        saved.append(path)
        if len(saved) == 3:
            raise KeyboardInterrupt
        save(path, picture)

    with monkeypatch.context() as patch:
        patch.setattr(cli_attack, "_save_png", stops)
        assert fedveil("attack", "run/captures", *QUICK, "--out", "stopped").code == 130
    assert len([name for name in files(tmp_path / "stopped") if name.endswith(".png")]) == 2
    assert fedveil("attack", "run/captures", *QUICK, "--out", "stopped").code == 0
    assert json.loads((tmp_path / "stopped/attack.json").read_text(encoding="utf-8"))["captures"]


def test_captures_with_truths_and_others_are_judged(fedveil: Fedveil, trained: Path, tmp_path: Path) -> None:
    given = ("attack", "run/captures", "--truths", "run/truths", "--data", "digits", *QUICK)
    said = fedveil(*given, "--out", "attacked")
    assert said.code == 0, said.err
    assert "\ninverting-gradients\n" in said.out
    assert "\n  defended, adaptive attacker" in said.out
    assert "linked (%)" in said.out
    assert "out of 100" in said.out
    assert "\nThe report is attacked/report.html\nResult: " in said.out
    result = json.loads((tmp_path / "attacked/result.json").read_text(encoding="utf-8"))
    assert result["attacked"] == "2 updates of 2 images each, captured in round 1 of 2 clients"
    assert "undefended (ceiling)" not in said.out
    assert f"Result: {result['verdict']['status']}" in said.out
    assert "captured gradients" in (tmp_path / "attacked/report.html").read_text(encoding="utf-8")
    pictures = [name for name in files(tmp_path / "attacked") if name.endswith(".png")]
    assert len(pictures) == 4 * 4  # images by original, naive, adaptive and floor
    assert Image.open(tmp_path / "attacked" / pictures[0]).size == (8, 8)
    tensors = safetensors.numpy.load_file(tmp_path / "attacked/reconstructions.safetensors")
    assert tensors["adaptive"].shape == tensors["original"].shape == (2, 2, 1, 8, 8)
    assert tensors["adaptive.labels"].shape == (2, 2)
    assert np.isfinite(tensors["adaptive"]).all()
    refused(fedveil("attack", "run/captures", *QUICK, "--out", "attacked"), "holds an earlier attack", "--overwrite")
    refused(fedveil("attack", "run/captures", *QUICK, "--out", "run"), "not empty")

    one = "round-0001-client-0001.safetensors"
    said = fedveil(
        *("attack", f"run/captures/{one}", "--truth", f"run/truths/{one}", *QUICK, "--data", "digits", "--json"),
        *("--defense", "none", "--no-link", "--out", "attacked", "--overwrite"),
    )
    summary = json.loads(said.out)
    assert summary["candidates"] == 100
    assert [row["role"] for row in summary["rows"]] == ["naive", "noise-floor", "mean-floor"]
    assert summary["rows"][0]["metrics"]["psnr"]["count"] == 2
    assert summary["status"] in summary["answers"][0]["status"]
    assert summary["median_cost"].keys() == {"inverting-gradients, naive", "inverting-gradients, noise-floor"}


def test_the_command_in_the_report_does_it_again(fedveil: Fedveil, trained: Path, tmp_path: Path) -> None:
    given = ("attack", "run/captures", "--truths", "run/truths", "--data", "digits", "--classes", "10", "--no-link")
    assert fedveil(*given, *QUICK, "--seed", "1", "--store", "kept", "--out", "first").code == 0
    first = json.loads((tmp_path / "first/result.json").read_text(encoding="utf-8"))
    command = shlex.split(first["provenance"]["command"])
    assert command[0] == "fedveil"
    assert fedveil(*command[1:], "--quiet", "--store", "none", "--out", "again").code == 0
    again = json.loads((tmp_path / "again/result.json").read_text(encoding="utf-8"))
    assert again["rows"] == first["rows"]
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"attack", "score"}


def test_the_analytic_attack_exposes_single_examples(fedveil: Fedveil, tmp_path: Path) -> None:
    wide = ("--data", "digits", "--model", "mlp:hidden=[64]", "--limit", "120", "--clients", "8")
    recorded = ("--rounds", "1", "--batch-size", "1", "--record-rounds", "1", "--quiet", "--out", "run")
    assert fedveil("train", *wide, *recorded).code == 0
    said = fedveil(
        *("attack", "run/captures", "--truths", "run/truths", "--data", "digits", "--attack", "analytic"),
        *("--json", "--out", "attacked"),
    )
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert {each["question"]: each["status"] for each in found["answers"]} == {
        "reconstruct": "exposed",
        "link": "exposed",
        "member": "not judged",
    }
    assert found["rows"][0]["metrics"]["psnr"]["low"] >= 80


def test_without_truths_nothing_is_judged_and_it_says_so(fedveil: Fedveil, trained: Path, tmp_path: Path) -> None:
    said = fedveil("attack", "run/captures", "--attack", "inverting-gradients:steps=3")
    assert said.code == 0, said.err
    assert "the labels are read off the update" in said.err
    assert "attack loss" in said.out
    assert "Result: not judged. It is not known which images were behind the updates." in said.out
    assert "Next: Give what was behind each update (`truth`)" in said.out
    assert "Reconstructions are in fedveil-out/attack-1" in said.out
    assert (tmp_path / "fedveil-out/attack-1/reconstructions.safetensors").is_file()
    assert (tmp_path / "fedveil-out/attack-1/report.html").is_file()
    assert fedveil("report", "fedveil-out/attack-1", "--path", "again.html").code == 0
    with_truths = fedveil("attack", "run/captures", "--truths", "run/truths", *QUICK, "--out", "alone")
    assert "Result: not judged. There were no other images to tell the right ones from." in with_truths.out
    assert "PSNR" in with_truths.out


def test_a_capture_from_elsewhere_needs_its_model_named(fedveil: Fedveil, tmp_path: Path) -> None:
    model = MLP(hidden=(4,)).build((1, 6, 6), 3)
    loss = torch.nn.functional.cross_entropy(model(torch.rand(1, 1, 6, 6)), torch.tensor([1]))
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shared = dict(zip(before, gradient, strict=True))
    Capture(kind="gradient", before=before, shared=shared, client=0, round=1, lr=(0.1,), batch_sizes=(1,)).save(
        tmp_path / "theirs.safetensors"
    )
    given = ("attack", "theirs.safetensors", "--attack", "idlg:steps=2", "--quiet", "--out", "attacked")
    refused(fedveil(*given), "--model lenet")
    refused(fedveil(*given, "--model", "mlp:hidden=[4]"), "--shape 1,28,28")
    refused(fedveil(*given, "--model", "mlp:hidden=[4]", "--shape", "1,6"), "channels,height,width")
    refused(
        fedveil(*given, "--model", "mlp:hidden=[5]", "--shape", "1,6,6", "--classes", "3"),
        "does not fit the model",
        "1.weight is (4, 36) in the update and (5, 36) in the model",
    )
    assert not (tmp_path / "attacked").exists()
    said = fedveil(*given, "--model", "mlp:hidden=[4]", "--shape", "1,6,6", "--classes", "3")
    assert said.code == 0, said.err


def test_a_fedavg_capture_is_attacked_through_its_local_steps(fedveil: Fedveil, tmp_path: Path) -> None:
    said = fedveil(
        *("train", *SMALL, "--limit", "8", "--rounds", "1", "--protocol", "fedavg", "--batch-size", "2"),
        *("--local-epochs", "2", "--record-rounds", "1", "--record-clients", "1", "--quiet", "--out", "run"),
    )
    assert said.code == 0, said.err
    said = fedveil("attack", "run/captures", "--truths", "run/truths", *QUICK, "--json", "--out", "attacked")
    assert said.code == 0, said.err
    assert json.loads(said.out)["rows"][0]["metrics"]["psnr"]["count"] == 4  # not once per epoch


def test_what_cannot_be_attacked_is_refused(fedveil: Fedveil, trained: Path, tmp_path: Path) -> None:
    one = "run/captures/round-0001-client-0000.safetensors"
    out = ("--out", "attacked")
    refused(fedveil("attack", "nowhere.safetensors", *out), "there is no fedveil capture at nowhere.safetensors")
    refused(fedveil("attack", "run/truths", *out), "is not a fedveil capture")
    refused(fedveil("attack", one, "--truth", one, *out), "is not a fedveil truth")
    refused(fedveil("attack", one, "--truths", "run/captures", "--truth", one, *out), "not both")
    refused(fedveil("attack", "run/captures", "--truth", one, *out), "2 captures but 1 truths")
    refused(fedveil("attack", one, "--labels", "known", *out), "needs the truths", "--labels recovered")
    refused(fedveil("attack", one, "--labels", "guessed", *out), "unknown source of labels", "recovered")
    refused(fedveil("attack", one, "--labels", "known", "--attack", "dlg", *out), "always takes labels 'optimized'")
    refused(fedveil("attack", one, "--model", "lenet", *out), "does not fit the model")
    refused(fedveil("attack", one, "--labels", "idlg", *out), "label of a single example, and this update is of 2")
    refused(fedveil("attack", one, "--model", "bert", *out), "bert takes text")
    refused(fedveil("attack", one, "--shape", "64,1,1", *out), "of 1 channels, an input's shape is (64, 1, 1)")
    refused(fedveil("attack", one, "--classes", "5", *out), "3.weight is (10, 16) in the update and (5, 16)")
    refused(fedveil("attack", one, "--defense", "nonsense", *out), "unknown defense 'nonsense'")
    refused(fedveil("attack", "run/model.safetensors", *out), "run/model.safetensors is not a fedveil capture")
    refused(fedveil("attack", "run/config.toml", *out), "run/config.toml is damaged or not a fedveil capture")
    (tmp_path / "empty").mkdir()
    refused(fedveil("attack", "empty", *out), "empty holds no capture")
    refused(fedveil("attack", one, "--truths", "empty", *out), "there is no fedveil truth at empty/")
    pictures = torch.rand(2, 1, 8, 8) / 10
    for truth, words in (
        (Truth(pictures[:, :, :4], torch.zeros(2).long(), pictures[:, :, :4]), "images of shape (1, 4, 8)"),
        (Truth(pictures, torch.tensor([0, 10]), pictures), "labels must be between 0 and 9"),
        (Truth(pictures, torch.zeros(2), pictures), "labels must be whole numbers"),
        (Truth(90 * pictures, torch.zeros(2).long(), pictures), "say how the inputs were normalized"),
        (Truth(pictures[:1], torch.tensor([0]), pictures[:1]), "a truth holds 1 examples, its capture is of 2"),
        (Truth(pictures.byte(), torch.zeros(2).long(), pictures.byte()), "not torch.uint8"),
        (Truth({"a": pictures}, torch.zeros(2).long(), {"a": pictures}), "only images can be scored"),
    ):
        truth.save(tmp_path / "other.safetensors")
        refused(fedveil("attack", one, "--truth", "other.safetensors", *out), words)
    refused(fedveil("attack", one, "--attack", "dgl", *out), "did you mean 'dlg'?")
    refused(fedveil("attack", one, "--backend", "fats", *out), "unknown backend")
    refused(fedveil("attack", one, "--truths", "run/truths", "--data", "digts", *out), "did you mean 'digits'?")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((tmp_path / one).read_bytes()[:-50])
    refused(fedveil("attack", damaged, *out), "damaged")
    assert not (tmp_path / "attacked").exists()


def test_a_file_may_hold_the_options_of_an_attack(fedveil: Fedveil, trained: Path, tmp_path: Path) -> None:
    config = tmp_path / "attack.toml"
    config.write_text('attack = "inverting-gradients:steps=3"\nlabels = "recovered"\nout = "from-file"\nseed = 3\n')
    given = ("attack", "run/captures", "--config", "attack.toml")
    assert fedveil(*given).code == 0
    assert (tmp_path / "from-file/attack.json").is_file()
    assert fedveil(*given, "--out", "from-line").code == 0  # the command line wins
    assert (tmp_path / "from-line/attack.json").is_file()
    for content, words in (
        ('atack = "x"', "did you mean 'attack'"),
        ('seed = "many"', "--seed"),
        ("seed = [", "not valid TOML"),
    ):
        config.write_text(content)
        refused(fedveil(*given, "--out", "nothing"), words)
    refused(fedveil("attack", "run/captures", "--config", "nowhere.toml"), "cannot read nowhere.toml")
    assert not (tmp_path / "nothing").exists()
