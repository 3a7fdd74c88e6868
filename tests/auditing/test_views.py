"""Audits of attackers who saw several messages about each batch: what is kept, said and promised."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import fedveil as fv
from fedveil.auditing.again import command_line
from fedveil.auditing.attackers import threat_of_row
from fedveil.auditing.attacking import Shown, lab_of, scene_of, scenes_by_role
from fedveil.auditing.keys import attack_key
from fedveil.auditing.observing import observe
from fedveil.auditing.sentences import at_most, counted_once
from fedveil.auditing.store import Store
from fedveil.auditing.threat_model import Attempted, Situation, assumptions, not_tried
from fedveil.auditing.workshop import Workshop
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.observers import Watch
from fedveil.ledger.statement import Statement
from fedveil.workers import Workers

ATTACK = fv.attacks.InvertingGradients(steps=6, restarts=1, polish=0)
SETTINGS = fv.AuditSettings(victims=3, candidates=10, reference="none")
NOISE = "gaussian-noise:sigma=0.1"


@pytest.fixture(scope="module")
def task() -> fv.Task:
    return fv.task("digits", model="mlp:hidden=[16],activation=sigmoid", clients=2)


def experiment(task: fv.Task, views: int, defense: str = NOISE, **more: Any) -> fv.Experiment:
    audit = dataclasses.replace(SETTINGS, views=views)
    return fv.Experiment(
        task=task, defense=(defense,), attack=(ATTACK,), audit=audit, trains=False, backend="stacked", **more
    )


def shop_of(task: fv.Task, views: int, store: Store | None = None, **more: Any) -> Workshop:
    return Workshop.open(experiment(task, views, **more), store or Store(), Workers(1), Watch())


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(tensor, right.message[name]) for name, tensor in left.message.items())


# ---- what is observed ---------------------------------------------------------------------------------------


def test_the_first_message_is_the_one_that_a_single_view_gives(task: fv.Task, tmp_path: Path) -> None:
    store = Store(tmp_path)
    one = observe(shop_of(task, 1, store), 1, None)
    assert [stage for stage, _ in store.made] == ["observe"]
    three = observe(shop_of(task, 3, store), 1, None)
    assert [stage for stage, _ in store.made] == ["observe", "observe"]  # the first was there
    assert one.views == ()
    assert len(three.views) == 2
    assert same(one.defended, three.defended)
    assert not same(three.views[0], three.defended)
    assert not same(three.views[0], three.views[1])
    again = observe(shop_of(task, 3, store), 1, None)
    assert len(store.made) == 2
    assert all(same(left, right) for left, right in zip(again.views, three.views, strict=True))
    alone = observe(shop_of(task, 3), 1, None)
    assert all(same(left, right) for left, right in zip(alone.views, three.views, strict=True))


def test_messages_are_about_the_same_batch(task: fv.Task) -> None:
    """Without noise to speak of, they are the same."""
    found = observe(shop_of(task, 2, defense="gaussian-noise:sigma=1e-12"), 1, None)
    for name, tensor in found.undefended.message.items():
        torch.testing.assert_close(found.views[0].message[name], tensor)


def test_without_a_defense_there_is_nothing_to_see_again(task: fv.Task) -> None:
    assert observe(shop_of(task, 4, defense="none"), 1, None).views == ()


def test_roles_who_face_the_defense_see_them_all(task: fv.Task) -> None:
    shop = shop_of(task, 3)
    seen = observe(shop, 1, None)
    scene = scene_of(shop.case, ATTACK, Shown(seen.defended, seen.labels, views=seen.views))
    scenes = scenes_by_role(scene, shop.chain, seen.undefended)
    assert {role: len(each.views) for role, each in scenes.items()} == {
        "ceiling": 0,
        "naive": 3,
        "adaptive": 3,
        "noise-floor": 0,
    }
    mean = sum((view.message["1.weight"] for view in seen.views), seen.defended.message["1.weight"]) / 3
    torch.testing.assert_close(scenes["naive"].updates.message["1.weight"], mean)
    single = scene_of(shop.case, ATTACK, Shown(seen.defended, seen.labels))
    assert single.updates is seen.defended
    two = scene_of(shop.case, ATTACK, Shown(seen.defended, seen.labels, views=seen.views[:1]))
    keys = {attack_key(ATTACK, each, "") for each in (single, two, scene)}
    assert len(keys) == 3
    apart = dataclasses.replace(scene, views=tuple(reversed(scene.views)))  # with the same mean
    assert attack_key(ATTACK, apart, "") not in keys
    assert lab_of(shop.case, ATTACK, scenes["naive"], None).views == 1
    knows = scenes["adaptive"] if "defense" in ATTACK.learns_about else None
    assert lab_of(shop.case, ATTACK, scenes["adaptive"], None).views == (3 if knows else 1)


# ---- what is said -------------------------------------------------------------------------------------------


def test_an_audit_says_how_many_messages_were_seen(task: fv.Task) -> None:
    found = fv.audit(experiment(task, 4)).result
    words = {row.role: row.threat.words for row in found.rows if row.threat is not None and row.attack == ATTACK.name}
    assert "saw 4 messages about each batch" in words["naive"]
    assert "saw 4 messages about each batch" in words["adaptive"]
    assert all("messages" not in words[role] for role in ("ceiling", "noise-floor"))
    told = {each.switch: each for each in found.assumptions}
    assert told["messages about each batch"].setting == "4"
    assert "4 messages about each" in found.attacked
    assert not any("set views" in line for line in found.not_tried)
    assert "--views 4" in command_line(found.provenance.config)


def test_a_single_view_is_as_before_and_names_what_was_not_tried(task: fv.Task) -> None:
    found = fv.audit(experiment(task, 1)).result
    assert all("messages" not in row.threat.words for row in found.rows if row.threat is not None)
    assert "messages about each batch" not in {each.switch for each in found.assumptions}
    assert "messages about each" not in found.attacked
    assert any("set views" in line for line in found.not_tried)


def test_what_is_not_drawn_anew_needs_no_second_look() -> None:
    model, tried = torch.nn.Sequential(torch.nn.Linear(2, 2)), Attempted(("inverting-gradients",))
    for spec, named in (("gradient-pruning", False), ("gradient-dropout", True), ("none", False)):
        situation = Situation(model, Chain.of(spec), updates=2, examples=1, rounds=(1,))
        assert any("set views" in line for line in not_tried(situation, tried)) == named
        again = dataclasses.replace(situation, views=3)
        assert ("messages about each batch" in {each.switch for each in assumptions(again, tried)}) == (spec != "none")
    assert threat_of_row("", "mean-floor", {}, 9).may == ()


def test_a_file_and_a_line_of_the_terminal_say_it() -> None:
    with pytest.raises(FedveilError, match="views must be greater"):
        fv.AuditSettings(views=0)
    assert fv.AuditSettings(views=7).views == 7


def test_captures_hold_one_message_about_each_batch(task: fv.Task) -> None:
    seen = fv.federate(task, None, fv.FederationSettings(rounds=1, record_rounds=(1,), record_clients=1))
    captures = [each.capture for each in seen.captured][:1]
    settings = dataclasses.replace(SETTINGS, views=2)
    with pytest.raises(FedveilError, match="one message about each batch"):
        fv.attack(captures, ATTACK, model=task.model, settings=settings)


# ---- what is promised ---------------------------------------------------------------------------------------


def test_bounds_are_composed_over_the_messages(task: fv.Task) -> None:
    private = "dp-clip:clip=1,sigma=8"
    one, many = (fv.audit(experiment(task, views, defense=private)).result for views in (1, 16))
    bounds = [max(row.bound for row in found.rows if row.bound is not None) for found in (one, many)]
    mu = 2 / 8  # two updates lie at most twice the clip apart
    normal = torch.distributions.Normal(0.0, 1.0)
    for bound, views in zip(bounds, (1, 16), strict=True):
        expected = normal.cdf(normal.icdf(torch.tensor(1 / 10)) + mu * views**0.5)
        assert bound == pytest.approx(float(expected), rel=1e-4)
    said = [" ".join(found.verdict.sentences) for found in (one, many)]
    assert "From one update no attacker" in said[0]
    assert "From 16 messages about one batch no attacker" in said[1]
    assert "does not hold for the 16" in said[1]
    assert "does not hold for" not in said[0]


def test_an_epsilon_says_what_it_counts() -> None:
    formal = Statement("ε = 1.", True, 1.0, 0.0, "ε = 1. More.")
    told = counted_once(formal, 3)
    assert told.sentence == (
        "ε = 1. This ε counts one message about each batch, and does not hold for the 3 that the attackers here saw."
    )
    assert told.paragraph.startswith("ε = 1. More. This ε counts")
    assert counted_once(formal, 1) is formal
    informal = dataclasses.replace(formal, formal=False)
    assert counted_once(informal, 3) is informal
    assert "From 3 messages about one batch" in at_most(0.2, 10, 3)
