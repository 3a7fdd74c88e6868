"""The leaderboard: who is on it, how it is sorted, and one's own defense by one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.auditing.result import Estimate
from fedveil.registry import defenses
from fedveil.report.leaderboard_page import leaderboard_markdown, render_leaderboard
from fedveil.study.comparison import Leak, Point
from fedveil.study.definition import Study
from fedveil.study.leaderboard import Board, Standing, table_of
from fedveil.study.strengths import every_defense

BOARD = """
title = "Board"
attack = ["inverting-gradients", "link"]
seeds = [0]
every = 1
[task]
data = "mnist"
[[rows]]
name = "no defense"
[[columns]]
head = "accuracy"
metric = "test"
"""
MINE = '''
from fedveil.defenses.base import Call, Defense
from fedveil.fields import declared
from fedveil.registry import defenses
from fedveil.tree import Tree


@defenses.register("halve")
@declared
class Halve(Defense):
    """Halve every entry."""

    place = "gradient"
    matched_as_it_is = True

    def protect(self, update: Tree, call: Call) -> Tree:
        return update.map(lambda g: g / 2)
'''


def near(mean: float) -> Estimate:
    return Estimate(mean=mean, low=mean - 0.05, high=mean + 0.05, count=16)


def standing(row: str, loss: float, rebuilt: float, linked: float = 0.0, member: float = 0.5) -> Standing:
    found = {"reconstruct": rebuilt, "link": linked, "member": member}
    leaks = {q: {"adaptive": Leak(measure=q, found=near(v), attack="a")} for q, v in found.items()}
    point = Point(
        family=row,
        defense=row,
        settings={},
        utility=near(0.9 - loss),
        loss=near(-loss),
        slowdown=1.5,
        leaks=leaks,  # type: ignore[arg-type]
        metrics={},
        guarantee="ε = 1 per update",
        formal=row == "formal",
    )
    return Standing(row, point)


def test_it_is_sorted_by_leakage_at_equal_cost() -> None:
    free, leaky, costly, formal = (
        standing("free", 0.004, 0.3),
        standing("leaky", 0.0, 0.4, linked=0.9),
        standing("costly", 0.3, 0.0),
        standing("formal", 0.04, 0.0, member=0.6),
    )
    ranked = sorted([costly, leaky, formal, free], key=lambda each: (each.cost, each.leak, each.loss))
    assert [each.row for each in ranked] == ["free", "leaky", "formal", "costly"]
    assert [each.cost for each in ranked] == [0, 0, 1, 3]
    assert formal.leak == pytest.approx(0.2)  # an AUC of 0.6, from 0.5 on
    assert leaky.leak == pytest.approx(0.9)  # the worst question
    table = table_of(Board("MNIST", None, {}, ranked, {"absent": "not run yet"}))
    assert table.groups == {
        0: "costs at most 1 point of accuracy",
        2: "costs at most 5 points of accuracy",
        3: "costs more than 20 points of accuracy",
    }
    assert table.rows[2][-1] == "ε = 1 per update"
    assert table.rows[0][-1] == "none"
    assert "absent: not run yet." in table.notes


def test_every_registered_defense_is_on_it_at_every_strength() -> None:
    study = Study.read(Path(__file__).parents[2] / "studies" / "leaderboard.toml")
    named = {row.name.partition(",")[0] for row in study.rows}
    assert set(every_defense()) <= named
    assert sum(row.name.startswith("gradient-dropout,") for row in study.rows) == 3
    assert any("at=gradient" in row.defense for row in study.rows if row.name.startswith("ppfa"))


def test_what_was_not_run_is_said(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(BOARD, encoding="utf-8")
    scaled, _ = Study.read(path).at_scale("smoke")
    boards = [Board("", None, {}, [], {"clip, norm=10": "not run yet"})]
    told = leaderboard_markdown(scaled, boards)
    assert "0 of 1 rows are there" in told
    assert "Nothing of it was run yet." in told
    assert "0 of 1 rows are there" in render_leaderboard(scaled, boards)


@pytest.mark.slow
def test_a_defense_of_ones_own_is_one_file_and_one_command(tmp_path: Path, fedveil) -> None:
    (tmp_path / "board.toml").write_text(BOARD, encoding="utf-8")
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    where = (str(tmp_path / "board.toml"), "--scale", "smoke", "--store", str(tmp_path / "store"))
    try:
        said = fedveil("study", "run", *where, "--add", str(tmp_path / "mine.py"))
        assert said.code == 0, said.err
        assert "halve" in said.out
        out = tmp_path / "board.md"
        assert fedveil("study", "export", *where, "--add", str(tmp_path / "mine.py"), "--out", str(out)).code == 0
        assert "| halve |" in out.read_text(encoding="utf-8")
    finally:
        defenses._loaded.pop("halve", None)


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "there is no file"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("x = 1", "registers no defense"),
    ],
)
def test_a_file_that_adds_nothing_is_one_line(text: str | None, why: str, tmp_path: Path, fedveil) -> None:
    (tmp_path / "board.toml").write_text(BOARD, encoding="utf-8")
    if text is not None:
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    said = fedveil("study", "run", str(tmp_path / "board.toml"), "--add", str(tmp_path / "mine.py"))
    assert said.code == 2
    assert why in said.err.strip().splitlines()[-1]
