"""Several labels and numbers to predict, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .console import Fedveil, refused

OWN = """
import torch


def ages():
    images = torch.rand(120, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return images, images.mean((1, 2, 3))
"""
SMALL = "mlp:hidden=[8],activation=sigmoid"
QUICK = ("--rounds", "1", "--victims", "2", "--candidates", "5", "--quiet", "--model", SMALL, "--attack", "analytic")


def test_regression_on_arrays_of_ones_own(fedveil: Fedveil, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    said = fedveil("train", "--data", "own.py:ages", "--model", "mlp:hidden=[8]", "--rounds", "1", "--out", "run")
    assert said.code == 0
    assert "mean squared error" in said.out
    assert "R²" in said.out
    shown = fedveil("data", "show", "own.py:ages")
    assert shown.code == 0
    refused(fedveil("train", "--data", "own.py:ages", "--model", "mlp", "--partition", "shards"), "use iid")
    said = fedveil("audit", "--data", "own.py:ages", *QUICK, "--out", "ages")
    assert said.code == 0
    found = json.loads((tmp_path / "ages" / "result.json").read_text())
    assert found["cost"]["metric"] == "mean squared error"
    assert "lower is better" in (tmp_path / "ages" / "report.html").read_text(encoding="utf-8")


def test_several_labels_of_a_named_set(fedveil: Fedveil, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    held = {}
    for part, count in (("train", 40), ("val", 12), ("test", 30)):
        held[f"{part}_images"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        held[f"{part}_labels"] = (random.random((count, 14)) < 0.3).astype(np.uint8)
    (tmp_path / "medmnist").mkdir()
    np.savez(tmp_path / "medmnist" / "chestmnist.npz", **held)
    said = fedveil("audit", "--data", "chestmnist", "--data-root", ".", *QUICK, "--out", "chest")
    assert said.code == 0
    found = json.loads((tmp_path / "chest" / "result.json").read_text())
    assert found["cost"]["metric"] == "AUROC"
    assert set(found["cost"]["others"]) == {"accuracy"}
    assert "atelectasis" in (tmp_path / "chest" / "report.html").read_text(encoding="utf-8").lower()
