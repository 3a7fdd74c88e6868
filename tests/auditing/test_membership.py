"""The third question of an audit: who is asked about, who looks at what, what is kept, and how it is judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedveil as fv
from fedveil.attacks.finding import Membership
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.judgment import Judgment, Terms
from fedveil.auditing.member_judgment import judge_members, widened
from fedveil.auditing.membership import member_rows, member_score, outsiders, pool_of_model, pool_of_updates
from fedveil.auditing.observing import observe
from fedveil.auditing.result import Cost, Estimate, Row
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import RoleScore
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.auditing.table import as_records
from fedveil.auditing.verdict import _MORE, judge
from fedveil.auditing.workshop import Workshop
from fedveil.errors import FedveilError
from fedveil.federation.observers import Watch
from fedveil.leakage.membership import AUC, LEFT_OUT, MEMBER, OTHER
from fedveil.leakage.modalities import modality
from fedveil.registry import attacks
from fedveil.report.render import render
from fedveil.workers import Workers

MODEL = "mlp:hidden=[16]"
ALL = ["update-alignment", "fedmia", "loss-threshold", "lira:references=2"]
SETTINGS = AuditSettings(victims=6, batch_size=2, nonmembers=60, link=False, reference="none")
TRAINING = fv.FederationSettings(rounds=2)


def audit(defense: str | None, attack: Any, **more: Any) -> AuditResult:
    given = {"federation": TRAINING, "settings": SETTINGS, "backend": "stacked"} | more
    return fv.audit(fv.task("digits", model=MODEL), defense, attack, **given)  # type: ignore[arg-type]


def members(result: AuditResult) -> list[Row]:
    return [row for row in result.result.rows if row.question == "member"]


# ---- which examples ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop() -> Iterator[Workshop]:
    experiment = Experiment(
        task={"data": "digits", "model": MODEL}, federation=TRAINING, audit=SETTINGS, attack=ALL, backend="stacked"
    )
    with Workers(1) as workers:
        yield Workshop.open(experiment, Store.of(None), workers, Watch())


def rows_in(inputs: Tensor) -> set[bytes]:
    return {row.float().numpy().tobytes() for row in inputs}


def test_others_are_nobodys_and_members_are_who_was_used(shop: Workshop) -> None:
    others = outsiders(shop)
    assert len(others[1]) == SETTINGS.nonmembers
    train, _ = shop.task.train.batch(range(len(shop.task.train)))
    assert shop.auxiliary is not None
    learned, _ = shop.auxiliary.examples.batch(range(len(shop.auxiliary.examples)))
    assert isinstance(train, Tensor)
    assert isinstance(learned, Tensor)
    apart = rows_in(others[0])
    assert not apart & rows_in(train)
    assert not apart & rows_in(learned)

    seen = observe(shop, 1, None)
    pool = pool_of_updates(shop, seen, others)
    assert isinstance(pool.suspects.inputs, Tensor)
    for victim, kinds in enumerate(pool.kinds):
        own = rows_in(seen.inputs[victim])
        assert rows_in(pool.suspects.inputs[kinds == MEMBER]) == own
        assert rows_in(pool.suspects.inputs[kinds == OTHER]) == apart
        assert (kinds == LEFT_OUT).sum() == 10  # behind the other updates
    assert set(pool.kinds[0, :10].tolist()) != {MEMBER, LEFT_OUT}  # mixed

    whole = pool_of_model(shop, others)
    assert isinstance(whole.suspects.inputs, Tensor)
    assert rows_in(whole.suspects.inputs[whole.kinds[0] == MEMBER]) <= rows_in(train)
    assert int((whole.kinds == MEMBER).sum()) == SETTINGS.nonmembers


def test_copies_of_training_examples_are_no_others() -> None:
    images = torch.rand(90, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(90) % 3
    copied = torch.cat([images[:5], images[60:]])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    task = fv.Task(model, ((images[:60], labels[:60]), (copied, torch.cat([labels[:5], labels[60:]]))))
    found = fv.audit(task, None, "update-alignment", train=False, settings=replace(SETTINGS, nonmembers=99))
    (row, *_) = members(found)
    assert row.curve is not None
    assert row.curve.others == 30


# ---- a whole audit -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> AuditResult:
    return audit("gaussian-noise:sigma=0.05", ALL)


def test_every_test_has_its_rows(found: AuditResult) -> None:
    rows = members(found)
    assert [(row.attack, row.role) for row in rows] == [
        (attack.partition(":")[0], role) for attack in ALL for role in ("ceiling", "naive", "adaptive", "noise-floor")
    ]
    assert {row.attack for row in rows if row.of_model} == {"loss-threshold", "lira"}
    assert all(row.metrics.keys() == {AUC} for row in rows)  # 60 others are too few for the rest
    assert sum(row.strongest for row in rows) == 1
    assert found.leakage["ceiling", AUC, "update-alignment"].mean > 0.9
    floor = found.leakage["noise-floor", AUC, "update-alignment"]
    assert floor.low < 0.5 < floor.high


def test_it_is_told_in_words_tables_records_and_the_report(found: AuditResult) -> None:
    answer = found.result.verdict.answer("member")
    assert answer is not None
    assert answer.status == "exposed"
    assert "tells members from others by an update in" in answer.sentence
    assert "(chance 50 %)" in answer.sentence
    assert "not measured" in str(found.leakage)
    assert any("others are 60 held-out examples" in note for note in found.result.verdict.notes)
    assert "examples in question" in {each.switch for each in found.result.assumptions}
    assert {"member_auc"} == {each["metric"] for each in as_records(members(found))}
    page = render(found.result, found.images)
    assert "Told who was a member" in page
    assert page.count("False alarms: % of the others taken for members (log scale)") == 4  # one for each test


def test_kept_and_found_again_and_made_anew_for_other_others(tmp_path: Path) -> None:
    told: list[str] = []

    def once(**changed: Any) -> AuditResult:
        told.clear()
        settings = replace(SETTINGS, **changed)
        found = audit(None, ["update-alignment"], settings=settings, train=False, store=tmp_path / "store")
        entries = sorted(path.name for path in (tmp_path / "store").rglob("*") if path.is_dir())
        told.extend(entries)
        return found

    first = once()
    entries = list(told)
    again = once(exposed_above=0.9)
    assert told == entries  # judged anew, nothing else
    assert members(again) == members(first)
    other = once(nonmembers=50)
    assert len(told) > len(entries)
    assert members(other) != members(first)


def test_without_training_the_model_is_not_asked() -> None:
    found = audit(None, None, suite="standard", train=False, settings=replace(SETTINGS, link=True))
    assert {row.attack for row in members(found)} == {"update-alignment"}
    assert any(
        "loss-threshold: it looks at the model that training comes to" in each for each in found.result.not_tried
    )
    silent = audit(None, None, suite="standard", train=False, settings=replace(SETTINGS, member=False, link=True))
    assert not members(silent)
    answer = silent.result.verdict.answer("member")
    assert answer is not None
    assert (answer.status, answer.why) == ("not judged", "No attack of this audit asks that.")


def test_rounds_are_told_apart_and_the_model_has_none() -> None:
    found = audit(None, ["update-alignment", "loss-threshold"], settings=replace(SETTINGS, rounds=(1, 2)))
    rounds = {(row.attack, row.round) for row in members(found)}
    assert rounds == {
        ("update-alignment", None),
        ("update-alignment", 1),
        ("update-alignment", 2),
        ("loss-threshold", None),
    }
    answer = found.result.verdict.answer("member")
    assert answer is not None
    assert "the trained model" in answer.why


def test_a_guarantee_bounds_what_is_measured() -> None:
    spec = "dp-sgd:noise_multiplier=2,clip=1"
    found = audit(spec, ["update-alignment", "loss-threshold"], settings=replace(SETTINGS, victims=20))
    guarded = [row for row in members(found) if row.role in ("naive", "adaptive")]
    assert len(guarded) == 4
    for row in guarded:
        assert row.bounds.keys() == {AUC, "member_tpr_1", "member_tpr_01"}
        for name, measured in row.metrics.items():
            assert measured.low <= row.bounds[name]
        assert row.bounds["member_tpr_01"] <= row.bounds["member_tpr_1"] <= 1
    assert not any(row.bounds for row in members(found) if row.role in ("ceiling", "noise-floor"))
    (update, *_) = (row for row in guarded if not row.of_model)
    assert update.bounds[AUC] == pytest.approx(0.5 * (1 + math.erf(0.5)), abs=1e-3)  # μ = 2/2, for another's place
    assert "AUC ≤ 0.77" in str(found.leakage)


def test_an_attack_must_score_every_example(shop: Workshop) -> None:
    attack = attacks.parse("update-alignment")
    pool = pool_of_model(shop, outsiders(shop))
    with pytest.raises(FedveilError, match="a score of every example"):
        member_score(attack, "naive", Membership(torch.zeros(1, 3), 0.0), pool)


# ---- judging -------------------------------------------------------------------------------------------------


def scored(role: Role, shift: float, count: int = 200, attack: str = "update-alignment", seed: int = 0) -> RoleScore:
    random = torch.Generator().manual_seed(seed)
    kinds = torch.tensor([[MEMBER] * count + [OTHER] * 400])
    scores = torch.randn(1, count + 400, generator=random, dtype=torch.float64) + shift * (kinds == MEMBER)
    return RoleScore(attack, role, "member", {}, scores=scores, kinds=kinds)


def judged(ceiling: float, adaptive: float, floor: float = 0.0, count: int = 200, **settings: Any) -> Judgment:
    scores = [scored("ceiling", ceiling, count), scored("adaptive", adaptive, count, seed=1)]
    rows = member_rows([*scores, scored("noise-floor", floor, count, seed=2)], [1])
    terms = Terms(AuditSettings(**settings), modality("pictures"), 100)
    found = judge_members(rows, terms, _MORE)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "ceiling, adaptive, status, reason",
    [
        (3.0, 3.0, "exposed", ""),
        (3.0, 0.6, "partly exposed", ""),
        (3.0, 0.0, "no leakage found by these attacks", ""),
        (0.0, 0.0, "not judged", "weak attack"),
    ],
)
def test_the_status_follows_from_the_thresholds(ceiling: float, adaptive: float, status: str, reason: str) -> None:
    found = judged(ceiling, adaptive)
    assert (found.status, found.reason) == (status, reason)


def test_thresholds_are_shares_of_what_is_above_chance() -> None:
    assert judged(3.0, 1.3).status == "exposed"  # an AUC of 0.82, above 0.75
    assert judged(3.0, 1.3, exposed_above=0.8).status == "partly exposed"


def test_few_members_rule_nothing_out() -> None:
    found = judged(6.0, 0.0, count=10)
    assert (found.status, found.reason) == ("not judged", "few examples")
    assert found.needed > 10


def test_a_floor_that_tells_members_without_training_is_what_has_to_be_beaten() -> None:
    assert judged(3.0, 1.0).status != "no leakage found by these attacks"
    assert judged(3.0, 1.0, floor=1.1).status in ("no leakage found by these attacks", "not judged")


def test_intervals_widen_with_the_looks() -> None:
    one = Estimate(mean=0.6, low=0.5, high=0.7, count=9)
    assert widened(one, 1).low == pytest.approx(0.5)
    assert widened(one, 8).low < 0.48
    assert widened(one, 8).high > 0.72


def test_more_than_a_guarantee_allows_is_told_loudly() -> None:
    scores = [scored("ceiling", 3.0), scored("adaptive", 3.0, seed=1), scored("noise-floor", 0.0, seed=2)]
    rows = member_rows(scores, [1], bounds={False: {AUC: 0.6}, True: {}})
    terms = Terms(AuditSettings(), modality("pictures"), 100)
    found = judge(rows, Cost(), "Formal guarantee: ε = 0.1.", terms)
    assert any("More members were told from others" in each.words and each.loud for each in found.warnings)
    assert found.question == "member"
