"""A comparison: what it shares, what it says, and that it goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil import FedveilError, audit, compare
from fedveil.auditing.result import Estimate
from fedveil.auditing.store import Store
from fedveil.study import running
from fedveil.study.advice import advice, best_within
from fedveil.study.compare import CompareResult, compared, planned
from fedveil.study.comparison import Comparison, Leak, Point
from fedveil.study.folding import with_front
from fedveil.study.rooms import IndexedStore
from fedveil.tasks.measures import measure
from fedveil.workers import Workers

from .grids import small

DEFENSES = "gaussian-noise,gradient-dropout:keep=0.5"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def result(store: Path) -> CompareResult:
    return compare(small(), DEFENSES, strengths=2, seeds=2, store=store)


def comparable(result: CompareResult) -> Any:
    return result.comparison.model_dump(exclude={"started", "seconds", "command", "undefended", "points"}), [
        point.model_dump(exclude={"slowdown"}) for point in (result.comparison.undefended, *result.comparison.points)
    ]


def test_every_defense_is_there_at_its_strengths(result: CompareResult) -> None:
    comparison = result.comparison
    assert [point.family for point in comparison.points] == ["gaussian-noise"] * 2 + ["gradient-dropout:keep=0.5"]
    assert [point.moved for point in comparison.points] == ["sigma=0.003922", "sigma=1", ""]
    assert comparison.questions == ["reconstruct", "link"]
    for point in comparison.points:
        assert set(point.leaks["link"]) == {"naive", "adaptive", "ceiling"}
        assert point.leaks["link"]["naive"].found.count == 6  # three updates in each of two runs
        assert point.utility.count == 2 * 256  # test examples
    assert comparison.undefended.leaks["link"]["ceiling"].found.mean == 1.0
    assert set(comparison.floors) == {"reconstruct", "link"}


def test_a_point_is_what_an_audit_finds(result: CompareResult, store: Path) -> None:
    kept = Store(store)
    found = [
        audit(small(defense="gaussian-noise:sigma=1", seed=seed), store=kept).result.row("adaptive", question="link")
        for seed in (0, 1)
    ]
    assert kept.made == []  # the comparison made all of it
    means = [row.metrics["linked"].mean for row in found if row is not None]
    assert result.comparison.points[1].leaks["link"]["adaptive"].found.mean == pytest.approx(sum(means) / 2)


def test_again_it_computes_nothing(result: CompareResult, store: Path) -> None:
    kept = IndexedStore(store)
    plan = planned(small(), DEFENSES, 2, [0, 1], kept, "")
    assert plan.estimates.kept == plan.estimates.results == 8
    assert plan.estimates.seconds == 0
    again = compared(plan, kept, Workers(1))
    assert kept.made == []
    assert comparable(again) == comparable(result)


def test_after_a_stop_it_goes_on_and_comes_to_the_same(
    result: CompareResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = running.audit_cell, list[str]()

    def stops(rooms: Any, grid: Any, cell: Any, *, wait: bool) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(cell.name)
        return real(rooms, grid, cell, wait=wait)

    monkeypatch.setattr(running, "audit_cell", stops)
    with pytest.raises(KeyboardInterrupt):
        compare(small(), DEFENSES, strengths=2, seeds=2, store=tmp_path)
    monkeypatch.undo()
    kept = IndexedStore(tmp_path)
    plan = planned(small(), DEFENSES, 2, [0, 1], kept, "")
    assert plan.estimates.kept == 3
    assert plan.estimates.seconds > 0
    assert comparable(compared(plan, kept, Workers(1))) == comparable(result)
    assert len([stage for stage, _ in kept.made if stage == "result"]) == 5


@pytest.mark.slow
def test_several_processes_come_to_the_same(result: CompareResult, tmp_path: Path) -> None:
    assert comparable(compare(small(), DEFENSES, strengths=2, seeds=2, store=tmp_path, workers=2)) == comparable(result)


def test_it_is_read_as_it_was_saved(result: CompareResult, tmp_path: Path) -> None:
    result.save(tmp_path)
    again = CompareResult.load(tmp_path)
    assert again.comparison == result.comparison
    assert {name: each.shape for name, each in again.pictures.items()} == {
        name: each.shape for name, each in result.pictures.items()
    }
    assert set(result.pictures) == {"originals", "undefended", "point 0", "point 1", "point 2"}
    assert result.pictures["point 2"].shape == (3, 1, 8, 8)
    with pytest.raises(FedveilError, match="holds no comparison"):
        CompareResult.load(tmp_path / "elsewhere")


def test_tables_have_a_row_for_every_point(result: CompareResult, tmp_path: Path) -> None:
    assert len(result.markdown().split("\n\n")[0].splitlines()) == 2 + 5
    assert result.latex().count(r"\\") == 1 + 5
    lines = result.csv(tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "family,defense,strength,what,measure,role,mean,low,high,count"
    assert len(lines) == 1 + len(result.comparison.records())
    assert "gaussian-noise" in str(result)


@pytest.mark.parametrize(
    "asked, experiment, why",
    [
        ("clipp", {}, "unknown defense 'clipp'"),
        ("", {}, "name at least one defense"),
        ("clip,clip", {}, "named twice"),
        ("clip", {"defense": "fedem"}, "leave the experiment's own defense empty"),
        ("clip", {"federation": {"rounds": 0}}, "rounds must be 1 or more"),
        ("pm", {}, "pm:epsilon=8: pm protects weights or a change of weights"),
    ],
)
def test_what_cannot_be_compared_is_told_before_any_work(
    asked: str, experiment: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(FedveilError, match=why):
        compare(small(**experiment), asked, strengths=2, store=tmp_path)
    assert not (tmp_path / "train").exists()


def test_of_all_defenses_those_that_cannot_be_used_are_left_out(tmp_path: Path) -> None:
    plan = planned(small(), "all", 1, [0], IndexedStore(tmp_path), "")
    assert {"pm", "duchi", "ldp-fl"} <= set(plan.left_out)
    assert {"fedem", "gradient-dropout", "dp-sgd"} <= {setting.family for setting in plan.settings}


# ---- what it says ------------------------------------------------------------------------------------------


def point(utility: float, leak: float, spread: float = 0.02, family: str = "d", naive: float = 0.0) -> Point:
    def near(mean: float) -> Estimate:
        return Estimate(mean=mean, low=mean - spread, high=mean + spread, count=100)

    role = "adaptive" if family else "ceiling"
    leaks: Any = {"link": {role: Leak(measure="linked", found=near(leak), attack="link")}}
    if family:
        leaks["link"]["naive"] = Leak(measure="linked", found=near(naive), attack="link")
    name = f"{family} {utility} {leak}"
    loss = near(utility - 0.9) if family else None
    return Point(family=family, defense=name, settings={}, utility=near(utility), loss=loss, leaks=leaks, metrics={})


def made(*points: Point, guess: float = 0.01, ceiling: float = 0.95) -> Comparison:
    marked, undefended = with_front(points, point(0.9, ceiling, family=""), measure("accuracy"))
    found = Estimate(mean=guess, low=0.0, high=guess + 0.02, count=100)
    return Comparison(
        data="digits",
        model="mlp",
        modality="pictures",
        protocol="FedSGD",
        attacked="9 updates",
        rounds=1,
        utility="accuracy",
        candidates=100,
        seeds=[0],
        attacks=["link"],
        undefended=undefended,
        points=marked,
        floors={"link": Leak(measure="linked", found=found, attack="")},
        command="",
        config={},
        versions={},
        started="",
    )


def test_the_front_has_what_nothing_beats() -> None:
    found = made(point(0.8, 0.5), point(0.7, 0.2), point(0.7, 0.3), point(0.9, 0.96))
    assert [bool(each.front) for each in found.points] == [True, True, False, False]
    assert found.undefended.front == ["link"]


def test_a_point_leaks_what_the_stronger_attacker_gets() -> None:
    leak = point(0.8, 0.3, naive=0.6).leaked("link")
    assert leak is not None
    assert leak.found.mean == 0.6


def test_the_best_within_a_cost_is_named() -> None:
    found = made(point(0.893, 0.5), point(0.86, 0.2), point(0.5, 0.0))
    best = best_within(found, "link", 0.01)
    assert best is not None
    assert best.defense == "d 0.893 0.5"
    told = advice(found)
    assert told[0].startswith("Linking: within 1 point of accuracy, d 0.893 0.5 leaks least: 50 % [48–52]")
    assert told[1].startswith("Linking: within 5 points of accuracy, d 0.86 0.2 leaks least")


def test_that_nothing_protects_is_an_answer() -> None:
    assert "nothing that was compared surely protects" in advice(made(point(0.9, 0.94)))[0]
    assert "every setting costs more than 1 point of accuracy" in advice(made(point(0.2, 0.1)))[0]


def test_an_attack_that_fails_undefended_says_nothing() -> None:
    (told,) = advice(made(point(0.9, 0.01), ceiling=0.03))
    assert "says nothing about any defense here" in told
