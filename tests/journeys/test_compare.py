"""`fedveil compare` as a user has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .console import SMALL, Fedveil

TINY = (*SMALL, "--rounds", "1", "--victims", "2", "--candidates", "5", "--reference", "none")
ATTACK = ("--attack", "inverting-gradients:steps=4,restarts=1,polish=0")


def test_a_comparison_from_the_plan_to_the_page(fedveil: Fedveil, tmp_path: Path) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    asked = ("--defenses", "clip,gaussian-noise:sigma=1", "--strengths", "2", "--out", str(out), "--store", str(store))
    said = fedveil("compare", *TINY, *ATTACK, *asked)
    assert said.code == 0, said.err
    assert "4 audits: at most" in said.err
    assert "[4/4] gaussian-noise:sigma=1, seed 0" in said.err
    assert "no defense (ceiling)" in said.out
    assert str(out / "frontier.html") in said.out
    assert {path.name for path in out.iterdir() if not path.name.startswith(".")} == {
        *("comparison.json", "frontier.html", "pictures.safetensors", "table.csv", "table.md", "table.tex"),
    }
    said = fedveil("compare", *TINY, *ATTACK, *asked)
    assert said.code == 2
    assert "holds a finished comparison" in said.err
    said = fedveil("compare", *TINY, *ATTACK, *asked, "--overwrite", "--json")
    assert "4 of 4 audits done" in said.err
    told = json.loads(said.out)
    assert {record["family"] for record in told["records"]} == {"", "clip", "gaussian-noise:sigma=1"}


def test_a_file_says_the_same(fedveil: Fedveil, tmp_path: Path) -> None:
    path = tmp_path / "compare.toml"
    path.write_text('[compare]\ndefenses = "clip:norm=1"\nstrength = 2\n', encoding="utf-8")
    said = fedveil("compare", "--config", str(path))
    assert said.code == 2
    assert "unknown key 'compare.strength': there are defenses, strengths, seeds" in said.err


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--defenses", "clipp"], "unknown defense 'clipp'"),
        (["--defenses", "clip", "--rounds", "0"], "rounds must be 1 or more"),
        (["--defenses", "clip", "--strengths", "0"], "--strengths must be 1 or more"),
        (["--defenses", "clip", "--seeds", "x"], "--seeds must be how many (3) or which (0,7), not 'x'"),
        (["--defenses", "clip", "--seeds", "0"], "--seeds must be how many"),
        (["--defenses", "duchi"], "protects weights"),
    ],
)
def test_bad_input_is_one_line(fedveil: Fedveil, arguments: list[str], why: str, tmp_path: Path) -> None:
    said = fedveil("compare", *SMALL, "--out", str(tmp_path / "out"), "--store", str(tmp_path / "store"), *arguments)
    assert said.code == 2
    assert why in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
