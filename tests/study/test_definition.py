"""Study files: families, scales, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.errors import FedveilError
from fedveil.study.definition import Study

BASE = """
paper = "A paper"
attack = ["inverting-gradients"]
[task]
clients = 4
model = "mlp"
[[columns]]
head = "PSNR"
metric = "psnr"
"""
GOOD = """
base = "base.toml"
title = "Table 1"
seeds = [0, 1]
[task]
model = "lenet"
[[groups]]
name = "digits"
[[rows]]
name = "clip"
defense = "clip:norm=1"
by_group = { digits = "clip:norm=2" }
[[rows]]
name = "none"
[published.digits]
clip = ["1.50"]
[scale.desk]
seeds = [7]
"federation.rounds" = 3
[scale.desk.groups.digits]
"federation.rounds" = 2
"""


def read(folder: Path, text: str = GOOD, base: str = BASE) -> Study:
    (folder / "base.toml").write_text(base, encoding="utf-8")
    (folder / "table.toml").write_text(text, encoding="utf-8")
    return Study.read(folder / "table.toml")


def test_a_file_goes_over_the_one_that_it_is_based_on(tmp_path: Path) -> None:
    study = read(tmp_path)
    assert study.paper == "A paper"
    assert study.settings["task"] == {"clients": 4, "model": "lenet"}
    assert [column.head for column in study.columns] == ["PSNR"]


def test_a_scale_goes_over_that_of_the_base_key_by_key(tmp_path: Path) -> None:
    below = """
[scale.desk]
"task.limit" = 100
"federation.rounds" = 9
[scale.desk.groups.digits]
"audit.victims" = 2
"federation.rounds" = 8
"""
    cuts = read(tmp_path, base=BASE + below).at_scale("desk")[1]
    assert cuts == [
        "task.limit = 100",
        "federation.rounds = 3",
        "digits: audit.victims = 2",
        "digits: federation.rounds = 2",
        "1 of 2 seeds",
    ]


def test_scales_change_the_audits_and_say_how(tmp_path: Path) -> None:
    paper, none = read(tmp_path).at_scale("paper")
    desk, cuts = read(tmp_path).at_scale("desk")
    assert none == []
    assert cuts == ["federation.rounds = 3", "digits: federation.rounds = 2", "1 of 2 seeds"]
    assert [cell.name for cell in desk.cells().values()] == ["digits, clip, seed 7", "digits, none, seed 7"]
    assert len(paper.cells()) == 4
    experiment = desk.cells()["digits, clip, seed 7"].experiment
    assert experiment.federation.rounds == 2
    assert str(experiment.chain) == "clip:norm=2"
    smoke, _ = read(tmp_path).at_scale("smoke")
    small = smoke.cells()["digits, clip, seed 0"].experiment
    assert small.attack[0].steps == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("seeds", "seed_s", "unknown key 'seed_s': did you mean 'seeds'?"),
        ("seeds = [0, 1]", "seeds = []", "seeds is empty"),
        ('title = "Table 1"', "", "title is required"),
        ('clip = ["1.50"]', 'clip = ["1.50", "2"]', "2 published numbers of 'clip' for 1 columns"),
        ("[published.digits]", "[published.mnist]", "published numbers of 'mnist', which is no group"),
        ('clip = ["1.50"]', 'clap = ["1.50"]', "published numbers of 'clap', which is no row"),
        ("[scale.desk]", "[scale.small]", "there is no scale 'small'"),
        ('base = "base.toml"', 'base = "no.toml"', "cannot read"),
        ('base = "base.toml"', 'base = "table.toml"', "based on each other in a circle"),
    ],
)
def test_bad_files_are_told_in_a_line(old: str, new: str, why: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(FedveilError) as error:
        read(tmp_path, GOOD.replace(old, new))
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_a_metric_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match="'psnrr' is no metric: did you mean 'psnr'"):
        read(tmp_path, base=BASE.replace('"psnr"', '"psnrr"'))
    with pytest.raises(FedveilError, match="every column, or every row, needs a metric"):
        read(tmp_path, base=BASE.replace('metric = "psnr"', ""))


def test_bad_settings_name_the_cell(tmp_path: Path) -> None:
    study = read(tmp_path, GOOD.replace('"federation.rounds" = 3', '"federation.round" = 3'))
    with pytest.raises(FedveilError, match=r"digits, clip, PSNR: .*federation.round.*did you mean 'federation.rounds'"):
        study.at_scale("desk")[0].cells()
    with pytest.raises(FedveilError, match="digits, clip, PSNR: unknown defense 'clipp'"):
        read(tmp_path, GOOD.replace("clip:norm=2", "clipp")).at_scale("paper")[0].cells()
    with pytest.raises(FedveilError, match="unknown scale 'big'"):
        study.at_scale("big")
