"""Tuning: what it searches, what it prunes, what it answers, and that it takes the same way again."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil.auditing.result import Estimate
from fedveil.errors import FedveilError
from fedveil.study.comparison import Leak, Point
from fedveil.study.rooms import IndexedStore
from fedveil.study.space import Space
from fedveil.study.tuning import Limit, Search, Trial
from fedveil.workers import Workers

from .grids import small

needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs fedveil[tune]")


class Half:
    """Suggests the middle, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[float, float, bool]] = {}

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        self.asked[name] = (low, high, log)
        return (low * high) ** 0.5 if log else (low + high) / 2


def test_a_space_has_the_strength_or_the_ranges_that_are_given() -> None:
    trial = Half()
    chain = Space.of("gradient-dropout:keep=0.2..0.8,sigma=1e-3..1e-1").suggested(trial)
    assert str(chain) == "gradient-dropout:keep=0.5,sigma=0.01"
    assert [log for _, _, log in trial.asked.values()] == [False, True]
    assert str(Space.of("clip:norm=2+gaussian-noise").suggested(Half())).startswith(
        "clip:norm=2+gaussian-noise:sigma=0.06"
    )
    assert str(Space.of("gradient-pruning").suggested(Half())) == "gradient-pruning"  # 0.99, between 0.9 and 0.999
    assert Space.of("clip:norm=2").ranges == ()


@pytest.mark.parametrize(
    "spec, why",
    [
        ("clipp", "unknown defense 'clipp'"),
        ("clip:norm=2..1", "must go from the smaller to the larger"),
        ("gradient-dropout:keep=0.5..2", "keep must be less than or equal to 1"),
        ("clip:norm=1e..2", "cannot read the range"),
    ],
)
def test_a_bad_space_is_refused_at_once(spec: str, why: str) -> None:
    with pytest.raises(FedveilError, match=why):
        Space.of(spec)


# ---- the choice, from made-up points ---------------------------------------------------------------------------


def near(mean: float, half: float = 0.01) -> Estimate:
    return Estimate(mean=mean, low=mean - half, high=mean + half, count=99)


def point(leak: float, loss: float, half: float = 0.01) -> Point:
    leaks: Any = {"link": {"adaptive": Leak(measure="linked", found=near(leak, half), attack="link")}}
    return Point(
        family="clip",
        defense="clip",
        settings={},
        utility=near(0.9 - loss),
        loss=near(-loss, half),
        leaks=leaks,
        metrics={},
        guarantee="Formal guarantee: none.",
    )


@pytest.fixture
def search(tmp_path: Path) -> Callable[..., Search]:
    def made(limit: Limit, *points: Point) -> Search:
        from fedveil.tasks.measures import measure

        found = Search(small(), [Space.of("clip")], limit, "link", [0], IndexedStore(tmp_path), Workers(1))
        found.undefended, found.measured = point(0.95, 0.0), measure("accuracy")
        found.ceiling = found.undefended.leaked("link")
        found.floor = Leak(measure="linked", found=near(0.01), attack="")
        for each in points:
            within = (each.loss is not None and -each.loss.mean <= limit.most) if limit.kind == "loss" else True
            found.trials.append(
                Trial(defense=f"clip:norm={1 + len(found.trials)}", state="within" if within else "beyond", point=each)
            )
        return found

    return made


def test_within_a_cost_the_least_leak_is_chosen(search: Callable[..., Search]) -> None:
    found = search(Limit("loss", 0.01), point(0.5, 0.005), point(0.3, 0.008), point(0.0, 0.2))
    chosen = found._chosen()
    assert chosen is not None
    assert chosen.defense == "clip:norm=2"


def test_it_says_how_sure_it_is(search: Callable[..., Search]) -> None:
    found = search(Limit("loss", 0.05), point(0.3, 0.01))
    sure = found._words(found.trials[0], point(0.3, 0.01))
    assert sure[0].startswith("Recommended: clip:norm=1. 30 % [29–31] leaks")
    assert sure[1] == "The whole 95 % interval lies within the limit."
    assert sure[-1] == "Formal guarantee: none."
    assert "reaches beyond the limit" in found._words(found.trials[0], point(0.3, 0.045))[1]
    assert "beyond the limit: it was lucky" in found._words(found.trials[0], point(0.3, 0.2))[1]


def test_that_nothing_protects_is_an_answer(search: Callable[..., Search]) -> None:
    found = search(Limit("loss", 0.05), point(0.94, 0.01))
    (told,) = found._words(found.trials[0], None)
    assert told.startswith("Nothing within this limit protects (at most 5 points of utility lost)")
    (told,) = search(Limit("loss", 0.001), point(0.2, 0.5))._words(None, None)
    assert told.startswith("Nothing within this limit was found")


# ---- with Optuna -----------------------------------------------------------------------------------------------

SPACES = ["gaussian-noise", "clip:norm=1"]


def searched(store: Path, limit: Limit) -> Search:
    base = small(audit={"victims": 16, "candidates": 20, "reference": "none"}, federation={"rounds": 2})
    return Search(base, [Space.of(each) for each in SPACES], limit, "link", [0], IndexedStore(store), Workers(1))


@needs_optuna
def test_the_same_command_takes_the_same_way_and_computes_nothing_again(tmp_path: Path) -> None:
    first = searched(tmp_path, Limit("loss", 1.0)).run(trials=3, confirm=1)
    assert len(first.trials) == 3
    again = searched(tmp_path, Limit("loss", 1.0))
    assert again.run(trials=3, confirm=1).model_dump() == first.model_dump()
    assert again.store.made == []
    longer = searched(tmp_path, Limit("loss", 1.0))
    assert longer.run(trials=4, confirm=0).trials[:3] == first.trials
    if first.recommended:
        assert tomllib.loads(first.config)["defense"][0]["name"] in ("gaussian-noise", "clip")


@needs_optuna
def test_what_surely_leaks_more_is_not_even_trained(tmp_path: Path) -> None:
    search = searched(tmp_path, Limit("leak", 0.0))
    search.spaces = [Space.of("clip:norm=1")]
    tuned = search.run(trials=2, confirm=0)
    assert [each.state for each in tuned.trials] == ["pruned", "pruned"]
    assert "surely leaks more" in tuned.trials[0].why
    assert sum(stage == "train" for stage, _ in search.store.made) == 1  # without a defense
    assert tuned.recommended == ""


@pytest.mark.parametrize(
    "arguments, why",
    [
        ([], "name one limit"),
        (["--max-accuracy-loss", "1%", "--max-identified", "5%"], "name one limit"),
        (["--max-identified", "five"], "a limit is a share"),
        (["--max-identified", "5%", "--by", "looks"], "--by must be reconstruct, link or member"),
        (["--max-identified", "5%", "--trials", "0", "--defenses", "nothing"], "unknown defense 'nothing'"),
        (["--max-identified", "5%", "--rounds", "0"], "rounds must be 1 or more"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], why: str, tmp_path: Path, fedveil) -> None:
    said = fedveil("tune", *arguments, "--out", str(tmp_path / "out"), "--store", str(tmp_path / "store"))
    assert said.code == 2
    assert why in said.err
    assert len(said.err.strip().splitlines()) == 1
