"""A model and data of one's own in a Python file, on the command line."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from .console import Fedveil, files, refused, run_program

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset

import fedveil as fv

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Sigmoid(), nn.Linear(8, classes))

    def forward(self, x):
        return self.layers(x)


class Scans(Dataset):
    classes = ["healthy", "\\x1b[2Jill"]

    def __init__(self, seed, count):
        self.pixels = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, place):
        return (self.pixels[place] - 0.5) / 0.25, place % 2


def hospitals():
    return {
        "clients": [Scans(0, 60), Scans(1, 100)],
        "normalization": fv.Normalization(MEAN, STD),
        "normalized": True,
    }
"""
QUICK = (
    *("--rounds", "2", "--protocol", "fedavg", "--victims", "2", "--attack", "inverting-gradients:steps=3"),
    *("--candidates", "5", "--reference", "none", "--quiet"),
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_an_audit_with_workers_goes_on_from_another_folder(fedveil: Fedveil, own: Path, tmp_path: Path) -> None:
    said = run_program(
        *("audit", "--data", "own.py:hospitals", "--model", "own.py:Net", *QUICK),
        *("--workers", "2", "--out", "run"),
        cwd=tmp_path,
    )
    assert said.code == 0, said.err
    kept = tomllib.loads((tmp_path / "run/config.toml").read_text())["task"]
    assert (kept["data"], kept["model"]) == (f"{own}:hospitals", f"{own}:Net")
    report = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "own.py:hospitals" in report
    assert "healthy" in report
    assert "\x1b" not in report
    result = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))
    assert result["holdings"]["sizes"] == [42, 70]
    assert result["holdings"]["labels"] == ["healthy", "\\x1b[2Jill"]

    # As if it had been stopped after training, and taken up elsewhere.
    (tmp_path / "run/result.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    again = run_program("audit", "--config", "../run/config.toml", "--resume", "--quiet", cwd=tmp_path / "elsewhere")
    assert again.code == 0, again.err
    repeated = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))
    assert repeated["rows"] == result["rows"]

    # Other code is computed anew: nothing of the old is taken for it.
    (tmp_path / "run/result.json").unlink()
    own.write_text(OWN.replace("nn.Sigmoid()", "nn.Tanh()"))
    assert fedveil("audit", "--config", "run/config.toml", "--resume", "--quiet").code == 0
    other = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))
    assert other["rows"] != result["rows"]
    assert other["provenance"]["hashes"]["model"] != result["provenance"]["hashes"]["model"]


def test_captures_are_attacked_with_the_file_that_the_user_names(fedveil: Fedveil, own: Path, tmp_path: Path) -> None:
    trained = ("train", "--data", "own.py:hospitals", "--model", "own.py:Net", "--rounds", "1", "--batch-size", "2")
    assert fedveil(*trained, "--record-rounds", "1", "--quiet").code == 0
    assert "fedveil-out/train-hospitals-Net-none-1/model.safetensors" in files(tmp_path)
    shutil.move(tmp_path / "fedveil-out/train-hospitals-Net-none-1", tmp_path / "run")
    capture = tmp_path / "run/captures/round-0001-client-0000.safetensors"
    assert str(tmp_path).encode() not in capture.read_bytes()  # no folder of this machine travels with it
    attack = ("attack", capture, "--attack", "inverting-gradients:steps=2", "--labels", "recovered", "--quiet")
    refused(fedveil(*attack), "own.py:Net", "give that file with --model")
    said = fedveil(*attack, "--model", "own.py:Net", "--out", "attacked")
    assert said.code == 0, said.err


def test_show_counts_what_a_file_holds_without_a_model(fedveil: Fedveil, own: Path) -> None:
    said = fedveil("data", "show", "own.py:hospitals")
    assert said.code == 0, said.err
    assert [line.split() for line in said.out.splitlines()[:2]] == [
        ["label", "client", "0", "1", "all"],
        ["healthy", *said.out.splitlines()[1].split()[1:]],
    ]
    assert "\\x1b[2Jill" in said.out
    assert "\x1b" not in said.out


def test_what_is_wrong_is_one_line_and_leaves_nothing(fedveil: Fedveil, own: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nowhere\n")
    refused(fedveil("audit", "--model", "gone.py:Net"), "there is no file", "gone.py")
    refused(fedveil("audit", "--data", "own.py:hospital", "--model", "mlp"), "did you mean 'hospitals'?")
    refused(fedveil("audit", "--model", "broken.py:Net"), "broken.py line 1: ModuleNotFoundError")
    refused(fedveil("data", "show", "own.py:Net"), "own.py:Net needs classes")
    refused(fedveil("audit", "--data", "own.py:hospitals", "--model", "mlp", "--clients", "9"), "leave the number")
    assert files(tmp_path) == ["broken.py", "own.py"]


def test_lists_and_help_run_no_file(fedveil: Fedveil, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('was run')\nraise SystemExit('was run')\n")
    for command in (("list",), ("data", "list"), ("audit", "--help")):
        assert "was run" not in fedveil(*command).out
