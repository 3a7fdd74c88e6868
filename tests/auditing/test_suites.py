"""Suites: which attacks run, which are left out and why, when a question is settled, and what a result says of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import fedveil as fv
from fedveil.attacks.base import Attack, Work
from fedveil.attacks.scene import Scene
from fedveil.auditing import suites
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.forecast import stages_of
from fedveil.auditing.result import TOGETHER, Result
from fedveil.auditing.store import Store
from fedveil.auditing.suites import DEFAULT, SUITES, Suite
from fedveil.auditing.workshop import Workshop
from fedveil.errors import FedveilError
from fedveil.federation.observers import Watch
from fedveil.fields import declared, parse_spec
from fedveil.registry import attacks
from fedveil.workers import Workers

from .learning import Nearest

SETTINGS = fv.AuditSettings(victims=8, candidates=20, reference="none")
LINEAR = "mlp:hidden=[16],activation=sigmoid"


def built(suite: Suite) -> list[Attack]:
    return [attacks.parse(spec) for spec in suite.attacks if parse_spec(spec)[0] in attacks.entries()]


# ---- what they are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_name_of_a_suite_is_registered(suite: Suite) -> None:
    names = [parse_spec(spec)[0] for spec in suite.attacks]
    assert sorted(set(names) - attacks.entries().keys()) == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_whoever_has_less_comes_first(suite: Suite) -> None:
    """Else an attack that has less would run for nothing, after one that has more: see `_settled_by`."""
    had = [set(each.threat.has) for each in built(suite) if each.question == "reconstruct"]
    assert not any(later < earlier for place, earlier in enumerate(had) for later in had[place + 1 :])


def test_each_suite_asks_every_question_and_the_larger_ones_have_the_attacks_of_the_smaller() -> None:
    asked = {suite.name: {each.question for each in built(suite)} for suite in SUITES.values()}
    every = {"reconstruct", "link", "member"}
    assert asked == {"quick": every - {"member"}, "standard": every, "thorough": every}
    quick, standard, thorough = ({parse_spec(spec)[0] for spec in each.attacks} for each in SUITES.values())
    assert quick <= standard < thorough
    assert (list(SUITES), DEFAULT) == (["quick", "standard", "thorough"], "standard")


# ---- attacks for these tests ---------------------------------------------------------------------------------


@declared
class Late(Nearest):
    """Learns, and asks what others asked before it."""

    name = "test-late"

    def estimate(self, scene: Scene) -> Work:
        return Work(seconds=2.0, fit_seconds=30.0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A suite of one's own, under the name of the default, with attacks that are forgotten afterwards."""
    monkeypatch.setattr(attacks, "_loaded", dict(attacks._loaded))
    attacks.register("test-late")(Late)

    def make(*specs: str, stops: bool = True) -> None:
        monkeypatch.setitem(suites.SUITES, DEFAULT, Suite(DEFAULT, "", specs, stops))

    return make


@pytest.fixture(scope="module")
def task() -> fv.Task:
    return fv.task("digits", model=LINEAR, clients=4)


def audit(task: fv.Task, defense: Any = "clip", **more: Any) -> AuditResult:
    given: dict[str, Any] = {"settings": SETTINGS, "train": False, "backend": "stacked"} | more
    return fv.audit(task, defense, **given)


def tried(result: Result) -> list[str]:
    return [run.attack for run in result.attacks]


# ---- left out ------------------------------------------------------------------------------------------------


def test_what_cannot_work_here_is_left_out_of_a_suite_and_refused_by_name(made: Any) -> None:
    made("link", "analytic", "idlg:steps=1", "inverting-gradients:steps=2", "test-late", "nobody:steps=3")
    convolutional = fv.task("digits", model="lenet", clients=4)
    settings = dataclasses.replace(SETTINGS, batch_size=2, victims=2, auxiliary="none")
    found = audit(convolutional, settings=settings).result
    assert tried(found) == ["link", "inverting-gradients"]
    said = {line.partition(": ")[0]: line for line in found.not_tried}
    assert "needs a trained linear layer" in said["the attack analytic"]
    assert "use a batch of 1" in said["the attack idlg"]
    assert said["the attack test-late"].endswith("there are no auxiliary data for it to learn from")
    assert said["the attack nobody"].endswith("no attack of this name is registered")
    others = next(line for line in found.not_tried if line.startswith("the attacks "))
    assert "analytic" not in others
    assert "dlg" in others
    for name, words in (("analytic", "linear layer"), ("idlg", "batch of 1"), ("test-late", "there are none")):
        with pytest.raises(FedveilError, match=words):
            audit(convolutional, attack=name, settings=settings)


def test_where_nothing_of_a_suite_is_left_that_is_said(made: Any) -> None:
    made("analytic", "test-late")
    with pytest.raises(FedveilError, match=r"no attack can be run: analytic: .*; test-late: there are no auxiliary"):
        audit(fv.task("digits", model="lenet", clients=4), auxiliary="none")


# ---- settled -------------------------------------------------------------------------------------------------


def test_a_question_that_is_settled_ends_early_and_no_other_does(made: Any, task: fv.Task) -> None:
    made("analytic", "inverting-gradients:steps=3", "test-late", "link")
    found = audit(task).result
    assert tried(found) == ["analytic", "link"]
    why = "not run, as the question was settled by analytic"
    assert found.not_tried[:2] == [f"the attack inverting-gradients: {why}", f"the attack test-late: {why}"]
    answers = {each.question: each for each in found.verdict.answers}
    assert (answers["reconstruct"].status, answers["reconstruct"].attack) == ("exposed", "analytic")
    assert answers["link"].sentence
    assert found.auxiliary is None  # nobody learned from any
    assert not any(row.attack == TOGETHER for row in found.rows)


@pytest.mark.parametrize("how", ["setting", "suite", "named"])
def test_where_nothing_may_be_left_out_all_are_run(made: Any, task: fv.Task, how: str) -> None:
    specs = ("analytic", "inverting-gradients:steps=3", "test-late", "link")
    made(*specs, stops=how != "suite")
    settings = dataclasses.replace(SETTINGS, stop_when_settled=how != "setting")
    found = audit(task, settings=settings, attack=list(specs) if how == "named" else None).result
    assert tried(found) == ["analytic", "inverting-gradients", "test-late", "link"]
    assert found.suite == ("" if how == "named" else DEFAULT)


def test_one_who_has_more_does_not_spare_one_who_has_less(made: Any, task: fv.Task) -> None:
    made("inverting-gradients:steps=150", "analytic")
    found = audit(task).result
    answer = found.verdict.answer("reconstruct")
    assert answer is not None
    assert answer.status == "exposed"
    assert tried(found) == ["inverting-gradients", "analytic"]  # which is not told the labels


def test_a_question_is_open_as_long_as_the_updates_are_not_exposed(made: Any, task: fv.Task) -> None:
    made("analytic", "inverting-gradients:steps=3", "test-late")
    found = audit(task, "gaussian-noise:sigma=100").result
    assert tried(found) == ["analytic", "inverting-gradients", "test-late"]
    strict = audit(task, settings=dataclasses.replace(SETTINGS, exposed_above=0.99)).result
    assert tried(strict) == ["analytic", "inverting-gradients", "test-late"]


# ---- what a result says --------------------------------------------------------------------------------------


def test_the_worst_case_stands_against_floors_of_the_same_attacks_and_names_the_winner(
    made: Any, task: fv.Task
) -> None:
    made("inverting-gradients:steps=2,polish=0", "test-late", "analytic", stops=False)
    found = audit(task, "none").result
    names = ["inverting-gradients", "test-late", "analytic"]
    for role in ("ceiling", "noise-floor"):
        together, own = found.row(role, TOGETHER), [found.row(role, name) for name in names]  # type: ignore[arg-type]
        assert together is not None
        rows = [row for row in own if row is not None]
        assert len(rows) == 3
        for place, winner in enumerate(together.winners):
            picked = [row.values["identified"][place] for row in rows]
            assert together.values["identified"][place] == max(picked)
            assert together.values["psnr"][place] == max(row.values["psnr"][place] for row in rows)
            assert picked[names.index(winner)] == max(picked)
        assert together.threat is not None
        assert {"labels", "reads the labels off the update"} <= {*together.threat.has, *together.threat.may}
    ceiling = found.row("ceiling", TOGETHER)
    assert ceiling is not None
    assert set(ceiling.winners) == {"analytic"}
    answer = found.verdict.answer("reconstruct")
    assert answer is not None
    assert (answer.attack, answer.winner) == (TOGETHER, "analytic")
    assert "(chance 5 %), each time with analytic" in answer.sentence


def test_every_row_says_what_its_attacker_has(made: Any, task: fv.Task) -> None:
    made("link", "inverting-gradients:steps=2", "test-late", stops=False)
    found = audit(task).result
    has = {(row.attack, row.role): row.threat.words for row in found.rows if row.threat is not None}
    assert len(has) == len(found.rows)
    assert has["inverting-gradients", "naive"] == "labels"
    assert has["inverting-gradients", "adaptive"] == "labels, knows the defense"
    assert has["inverting-gradients", "ceiling"] == "undefended updates, labels"
    assert has["inverting-gradients", "noise-floor"] == "no update, labels"
    assert has["", "mean-floor"] == "no update, the mean of the training data"
    assert has["link", "naive"] == "candidates (20, one is right)"
    data = "auxiliary data (180 held-out test images)"
    assert has["test-late", "adaptive"] == f"{data}, knows the defense"
    assert has[TOGETHER, "adaptive"] == f"labels, {data}, knows the defense"


# ---- how long it takes ---------------------------------------------------------------------------------------


def test_what_is_ahead_counts_attacks_that_learn_and_all_roles(made: Any, task: fv.Task) -> None:
    made("link", "inverting-gradients:steps=20", "test-late")

    def ahead(defense: str | None, rounds: tuple[int, ...] = (1,)) -> dict[str, float]:
        settings = dataclasses.replace(SETTINGS, rounds=rounds)
        experiment = fv.Experiment(task=task, defense=defense, audit=settings, backend="stacked")
        stages = stages_of(Workshop.open(experiment, Store(), Workers(1), Watch()))
        return {stage.line.removeprefix("attacking with "): stage.work for stage in stages if stage.kind == "attack"}

    bare, defended, twice = ahead(None), ahead("cdp"), ahead("cdp", (1, 2))
    assert list(bare) == ["link", "inverting-gradients", "test-late"]
    assert bare["test-late"] == 2 * 2.0 + 30.0  # the ceiling and the floor, and what is learned once
    assert defended["test-late"] == 4 * 2.0 + 2 * 30.0
    assert defended["inverting-gradients"] == pytest.approx(2 * bare["inverting-gradients"])
    assert defended["link"] > 0
    assert twice == pytest.approx({name: 2 * work for name, work in defended.items()})


def test_learning_is_part_of_the_progress(task: fv.Task, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made("test-late")
    told: list[float] = []
    learn = Late.fit

    def fit(self: Late, lab: Any) -> Any:
        lab.report(1, 2)
        return learn(self, lab)

    monkeypatch.setattr(Late, "fit", fit)
    audit(task, watch=Watch(attack=lambda done, total: told.append(done / total)))
    assert told == sorted(told)
    # Two are learned, for 30 of 68 s each; the first is half done, done, and so on.
    assert told[:4] == pytest.approx([15 / 68, 30 / 68, 45 / 68, 60 / 68], abs=0.002)
