"""Training says what is promised over it, whatever is learned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from .console import SMALL, Fedveil

DP = ("--defense", "dp-sgd:noise_multiplier=1.5", "--batch-size", "4", "--quiet")


def history(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "history.json").read_text(encoding="utf-8"))
    return found


def test_the_guarantee_is_printed_and_kept(fedveil: Fedveil, tmp_path: Path) -> None:
    said = fedveil("train", *SMALL, *DP, "--rounds", "2", "--out", "a")
    assert said.code == 0, said.err
    kept = history(tmp_path / "a")["guarantee"]
    assert isinstance(kept, dict)
    assert kept["formal"]
    assert kept["epsilon"] > 0
    assert "over 2 rounds" in kept["sentence"]
    assert kept["paragraph"] in said.out.splitlines()
    assert kept["paragraph"].startswith(kept["sentence"])
    assert "How many examples a client has is not covered" in said.out
    summary = json.loads(fedveil("train", "--config", "a/config.toml", "--resume", "--json", "--quiet").out)
    assert summary["guarantee"] == kept
    bare = fedveil("train", *SMALL, "--rounds", "1", "--quiet", "--out", "bare")
    assert "Formal guarantee: none." in bare.out


def test_the_line_that_does_it_again_names_the_backend_and_gives_the_same_bits(
    fedveil: Fedveil, tmp_path: Path
) -> None:
    assert fedveil("train", *SMALL, "--rounds", "1", "--quiet", "--out", "a").code == 0
    backend = history(tmp_path / "a")["backend"]
    options = ("--config", "a/config.toml", "--backend", str(backend), "--quiet", "--out", "b")
    assert fedveil("train", *options).code == 0
    named = f"--backend {backend} "
    for name, told in (("a", named), ("b", "")):  # where a backend was asked for, the file says so
        text = (tmp_path / name / "config.toml").read_text(encoding="utf-8")
        assert text.startswith(f"# fedveil train --config config.toml {told}does this again")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_of_a_run_that_stops_early_the_rounds_that_were_count(fedveil: Fedveil, tmp_path: Path) -> None:
    # At a rate of nearly nothing the validation accuracy never rises.
    options = (*SMALL, *DP, "--lr", "1e-12", "--split", "60/20/20", "--out")
    whole = fedveil("train", *options, "short", "--rounds", "3")
    assert whole.code == 0, whole.err
    said = fedveil("train", *options, "stopped", "--rounds", "30", "--patience", "2")
    assert said.code == 0, said.err
    found = history(tmp_path / "stopped")
    assert (found["early_stopped"], found["rounds"]) == (True, 3)
    assert found["guarantee"] == history(tmp_path / "short")["guarantee"]


def test_rounds_without_the_defense_undo_the_guarantee(fedveil: Fedveil) -> None:
    said = fedveil("train", *SMALL, *DP, "--rounds", "2", "--warmup-rounds", "1", "--out", "warm")
    assert "Formal guarantee: none." in said.out
    assert "the first round runs without it" in said.out


def test_several_labels_have_their_guarantee_too(fedveil: Fedveil, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    held = {}
    for part, count in (("train", 12), ("val", 3), ("test", 4)):
        held[f"{part}_images"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        held[f"{part}_labels"] = random.integers(0, 2, (count, 14), dtype=np.uint8)
    np.savez_compressed(tmp_path / "chestmnist.npz", **held)
    task = ("--data", "chestmnist", "--data-root", tmp_path, "--model", "mlp:hidden=[8]", "--clients", "2")
    said = fedveil("train", *task, *DP, "--rounds", "1", "--json", "--out", "chest")
    assert said.code == 0, said.err
    assert json.loads(said.out)["guarantee"]["epsilon"] > 0


def test_text_has_its_guarantee_too(fedveil: Fedveil, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "sst2").mkdir()
    for part, count in (("train", 12), ("dev", 4), ("test", 4)):
        words = ("river", "stone", "light", "paper")
        lines = "".join(f"a {words[place % 4]} of charm and wit\t{place % 2}\n" for place in range(count))
        (tmp_path / f"sst2/{part}.tsv").write_text(lines, encoding="utf-8")
    task = ("--data", "sst2:length=8,vocabulary=300", "--data-root", tmp_path, "--clients", "2")
    model = ("--model", "bert:width=8,layers=1,heads=1")
    said = fedveil("train", *task, *model, *DP, "--rounds", "1", "--out", "text")
    assert said.code == 0, said.err
    assert "Formal guarantee: ε = " in said.out
