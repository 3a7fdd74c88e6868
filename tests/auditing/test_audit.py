"""A whole audit, small: what it finds, keeps and refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.attacks.base import Attack
from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import Document, Estimate, load_result
from fedveil.defenses.base import Call, Defense
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.tasks.task import label_table
from fedveil.tree import Tree

ATTACK = "inverting-gradients:steps=60"


@pytest.fixture(scope="module")
def task() -> fv.Task:
    return fv.task("digits", model="mlp:hidden=[32],activation=sigmoid", clients=4)


@pytest.fixture(scope="module")
def outcome(task: fv.Task) -> AuditResult:
    return fv.audit(
        task,
        "gradient-dropout:keep=0.6",
        ATTACK,
        federation=fv.FederationSettings(rounds=2, batch_size=32),
        settings=fv.AuditSettings(victims=6, rounds=(1, 2)),
        backend="stacked",
    )


def test_the_table_has_every_row_with_intervals(outcome: AuditResult) -> None:
    roles = ["ceiling", "naive", "adaptive", "noise-floor"]
    rows = [(row.round, row.question, row.role) for row in outcome.result.rows]
    asked = [("reconstruct", role) for role in roles] + [("link", role) for role in roles]
    expected = [*asked, ("reconstruct", "mean-floor")]
    assert rows == [(number, *each) for number in (None, 1, 2) for each in expected]
    for row in outcome.result.rows:
        for name, value in row.metrics.items():
            assert value.low <= value.mean <= value.high, (row.role, name)
            assert value.count == len(row.values[name]) == (12 if row.round is None else 6)  # victims of both rounds
    assert [row.question for row in outcome.result.rows if row.strongest] == ["reconstruct", "link"]
    assert outcome.leakage["ceiling", "psnr"].mean > outcome.leakage["mean-floor", "psnr"].mean


def test_rounds_can_be_told_apart(outcome: AuditResult, task: fv.Task) -> None:
    table = outcome.leakage
    for role in ("ceiling", "adaptive", "mean-floor"):
        first, second = (table.of(round=number)[role, "psnr"] for number in (1, 2))
        assert table[role, "psnr"].mean == pytest.approx((first.mean + second.mean) / 2)
    assert "\ninverting-gradients, round 2\n  undefended (ceiling)" in str(table)
    alone = fv.audit(
        task,
        "gradient-dropout:keep=0.6",
        ATTACK,
        settings=fv.AuditSettings(victims=6, rounds=(1,)),
        train=False,
        backend="stacked",
    )
    near = pytest.approx(table.of(round=1)["ceiling", "psnr"].mean, rel=1e-3)
    assert alone.leakage["ceiling", "psnr"].mean == near
    found = outcome.result.row("ceiling", round=1)
    assert found is not None
    assert found.metrics["psnr"].mean == near
    assert [row.round for row in alone.result.rows] == [None] * len(alone.result.rows)
    for asked, said in ((alone.leakage, "one round was attacked"), (table, r"there are \[1, 2\]")):
        with pytest.raises(FedveilError, match=said):
            asked.of(round=3)


def test_of_several_attacks_the_strongest_answers(task: fv.Task) -> None:
    attacks = ["dlg:steps=1", ATTACK]  # the weak one first
    settings = fv.AuditSettings(victims=3, reference="none")
    found = fv.audit(task, "clip", attacks, settings=settings, train=False, backend="stacked")
    table = found.leakage
    for metric, most in (("psnr", max), ("mse", min)):
        each = [table["naive", metric, name].mean for name in ("dlg", "inverting-gradients")]
        assert table["naive", metric].mean == most(each) == each[1] != each[0]
    row = found.result.row("naive")
    assert row is not None
    assert row.attack == "inverting-gradients"
    with pytest.raises(KeyError):
        table["naive", "psnr", "idlg"]


def test_it_says_who_holds_what(outcome: AuditResult, task: fv.Task) -> None:
    held = outcome.result.holdings
    assert held is not None
    assert held.sizes == [len(places) for places in task.clients]
    assert held.counts == label_table(task)
    assert (held.labels, held.partition, held.several) == ([*"0123456789"], "iid", False)


def test_cost_is_measured_on_the_same_test_examples(outcome: AuditResult) -> None:
    cost = outcome.result.cost
    assert cost.defended is not None
    assert cost.undefended is not None
    assert cost.difference is not None
    assert cost.difference.mean == pytest.approx(cost.defended.mean - cost.undefended.mean)
    assert [each.round for each in cost.history] == [0, 1, 2]
    assert cost.bytes_per_round["up"] > 0


def test_the_attack_is_described(outcome: AuditResult) -> None:
    run, link = outcome.result.attacks
    assert (run.question, link.question) == ("reconstruct", "link")
    assert link.curves == []
    assert run.curves[0].steps[-1] == 60 + 20  # of Adam, and of the polish
    assert set(run.on_the_way["ceiling"]["ssim"]) == {"1/3", "2/3", "all"}
    assert run.label_recovery is None
    assert outcome.result.defense.facts["measured cosine to the true update"]
    assert not outcome.result.defense.formal


def test_saving_and_loading(outcome: AuditResult, tmp_path: Path) -> None:
    outcome.save(tmp_path)
    result, images = load_result(tmp_path)
    assert result.model_dump_json() == outcome.result.model_dump_json()
    assert np.array_equal(images.originals, outcome.images.originals)
    assert images.reconstructions.keys() == outcome.images.reconstructions.keys()
    (tmp_path / "result.json").write_text(json.dumps({"format": "something"}))
    with pytest.raises(FedveilError, match="not a fedveil result"):
        load_result(tmp_path)
    with pytest.raises(FedveilError, match="holds no result"):
        load_result(tmp_path / "nothing")


def test_documents_keep_what_is_not_a_number() -> None:
    class Holder(Document):
        estimate: Estimate

    held = Holder(estimate=Estimate(mean=math.nan, low=-math.inf, high=math.inf, count=1))
    back = Holder.model_validate_json(held.model_dump_json())
    assert math.isnan(back.estimate.mean)
    assert back.estimate.low == -math.inf


def test_same_seed_same_result(task: fv.Task) -> None:
    def numbers() -> list[dict[str, list[float]]]:
        found = fv.audit(
            task, "gaussian-noise", ATTACK, settings=fv.AuditSettings(victims=2), train=False, seed=5, backend="stacked"
        )
        return [row.values for row in found.result.rows]

    assert numbers() == numbers()


def test_without_a_defense(task: fv.Task) -> None:
    found = fv.audit(
        task, None, ATTACK, settings=fv.AuditSettings(victims=4, source="test"), train=False, backend="stacked"
    )
    assert [row.role for row in found.result.rows] == ["ceiling", "noise-floor"] * 2 + ["mean-floor"]
    assert found.result.cost.rounds == 0
    assert found.result.verdict.sentences[0].startswith("Without a defense, an attacker picks")


def test_labels_are_read_off(task: fv.Task) -> None:
    attack = fv.attacks.InvertingGradients(steps=5, labels="recovered")
    settings = fv.AuditSettings(victims=4, batch_size=4)
    found = fv.audit(task, "clip", attack, settings=settings, train=False, backend="stacked")
    run = found.result.attacks[0]
    assert run.label_recovery is not None
    assert run.label_recovery.mean > 0.5
    assert found.images.originals.shape[0] == 16


@pytest.mark.parametrize("local_steps", ["unrolled", "pseudo-gradient"])
def test_fedavg(task: fv.Task, local_steps: str) -> None:
    federation = fv.FederationSettings(protocol="fedavg", rounds=1, batch_size=1, local_epochs=2, lr=0.05)
    settings = fv.AuditSettings(victims=2, batch_size=2, local_steps=local_steps)  # type: ignore[arg-type]
    found = fv.audit(task, "gradient-dropout", ATTACK, federation=federation, settings=settings, backend="stacked")
    words = {each.switch: each.setting for each in found.result.assumptions}
    assert words["local steps"] == local_steps
    assert words.get("order of the examples") == ("searched" if local_steps == "unrolled" else None)
    assert found.leakage["ceiling", "psnr"].mean > found.leakage["noise-floor", "psnr"].mean


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def test_own_model_with_batch_norm_and_dropout_says_what_was_assumed() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(200, 1, 8, 8, generator=generator)
    task = fv.Task(model=Dropping(), data=(images, torch.arange(200) % 10), clients=2)
    found = fv.audit(
        task, "clip", ATTACK, settings=fv.AuditSettings(victims=2, batch_size=4), train=False, backend="stacked"
    )
    words = {each.switch: each.setting for each in found.result.assumptions}
    assert words["batch-norm statistics"] == "not known"
    assert words["dropout masks"] == "not known"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": fv.AuditSettings(rounds=(3,)), "train": False}, "cannot be attacked without training"),
        ({"settings": fv.AuditSettings(rounds=(99,))}, "trains 10 rounds"),
        ({"attack": "idlg", "settings": fv.AuditSettings(batch_size=2)}, "batch of 1"),
        ({"attack": []}, "needs an attack"),
        ({"attack": ["dlg", "dlg"]}, "named once"),
        ({"attack": "inverting-gradient"}, "did you mean 'inverting-gradients'"),
        ({"defense": "clip:norm=-1"}, "norm must be greater than 0"),
        ({"settings": fv.AuditSettings(source="test", victims=10_000)}, "leave no test examples"),
        ({"task": fv.task("digits", model="lenet"), "attack": "analytic"}, "linear"),
    ],
)
def test_refused_before_any_work(task: fv.Task, change: dict[str, object], message: str) -> None:
    with pytest.raises(FedveilError, match=message):
        fv.audit(**{"task": task, **change})  # type: ignore[arg-type]


def test_inputs_that_are_no_pictures_are_refused() -> None:
    labels = torch.arange(100) % 2
    flat = fv.Task(model=nn.Linear(5, 2), data=(torch.rand(100, 5), labels), clients=2)
    with pytest.raises(FedveilError, match="scores images"):
        fv.audit(flat)
    wild = fv.Task(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), data=(10 * torch.randn(100, 1, 8, 8), labels))
    with pytest.raises(FedveilError, match="not pixels"):
        fv.audit(wild)


def own_audit(task: fv.Task, **more: Any) -> AuditResult:
    settings = more.pop("settings", fv.AuditSettings(victims=2, reference="none", candidates=10))
    given: dict[str, Any] = {"train": False, "backend": "stacked", "settings": settings} | more
    return fv.audit(task, given.pop("defense", "clip"), ATTACK, **given)


def values(outcome: AuditResult) -> list[dict[str, list[float]]]:
    return [row.values for row in outcome.result.rows]


# ---- early stopping before an attacked round --------------------------------------------------------------------

STOPPING = fv.FederationSettings(
    rounds=8, batch_size=16, lr=1e-9, patience=2
)  # nothing gets better: over after round 3


def test_rounds_that_were_not_reached_are_named_and_the_others_attacked(task: fv.Task) -> None:
    settings = fv.AuditSettings(victims=2, rounds=(1, 2, 6), reference="none")
    found = own_audit(task, federation=STOPPING, train=True, settings=settings)
    assert {row.round for row in found.result.rows} == {None, 1, 2}
    assert found.result.not_tried[0] == "round 6: early stopping ended the training after round 3"
    assert found.result.provenance.config["audit"]["rounds"] == (1, 2, 6)


def test_where_no_attacked_round_was_reached_the_kept_model_is_attacked(task: fv.Task) -> None:
    def audit(number: int) -> AuditResult:
        return own_audit(
            task,
            federation=STOPPING,
            train=True,
            settings=fv.AuditSettings(victims=2, rounds=(number,), reference="none"),
        )

    late, second = audit(7), audit(2)
    assert "round 7: early stopping ended the training after round 3" in late.result.not_tried[0]
    assert "the model that training kept is attacked, which round 2 starts from" in late.result.not_tried[1]
    assert values(late) == values(second)
    assumed = {each.switch: each.setting for each in late.result.assumptions}
    assert assumed["attacked update"] == "1 example, round 2"
    with pytest.raises(FedveilError, match="after round 3, in the warm-up"):
        own_audit(
            task,
            federation=replace(STOPPING, warmup_rounds=5),
            train=True,
            settings=fv.AuditSettings(victims=2, rounds=(7,), reference="none"),
        )


# ---- strangers' classes -----------------------------------------------------------------------------------------


@declared
class Silent(Defense):
    """Says nothing of what an attacker who knows it would do."""

    name = "test-silent"

    def protect(self, update: Tree, call: Call) -> Tree:
        return update * 0.5


def test_no_informed_attacker_is_claimed_where_none_could_be_informed(task: fv.Task) -> None:
    alone = own_audit(task, defense=Silent())
    assert [row.role for row in alone.result.rows] == ["ceiling", "naive", "noise-floor"] * 2 + ["mean-floor"]
    together = own_audit(task, defense=[Silent(), fv.defenses.Clip()])  # of one of the two it knows
    assert "adaptive" in [row.role for row in together.result.rows]
    with pytest.raises(FedveilError, match="test-silent does not say what an attacker who knows it would do"):
        own_audit(task, defense=Silent(), settings=fv.AuditSettings(victims=2, attackers="adaptive"))


@declared
class Empty(GradientMatching):
    name = "test-empty"


@declared
class Odd(GradientMatching):
    name = "test-odd"
    what: str = "none"

    def recipe(self) -> Recipe:
        made = {
            "none": None,
            "match": Recipe(match="euclid"),  # type: ignore[arg-type]
            "steps": Recipe(tries=((Phase(0),),)),
        }
        return made[self.what]  # type: ignore[return-value]


class Bare(Attack):
    pass


@declared
class Speechless(Attack):
    name = "test-speechless"
    modalities = ("sentences",)


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (Empty(), "Empty does not define `recipe`"),
        (Empty, r"Empty is a class: write Empty\(\)"),
        (3, "a table with a name, or an instance .got 3"),
        (Odd(), "must return a `Recipe`, not None"),
        (Odd(what="match"), "match must be one of l2, .*cosine, .*got 'euclid'"),
        (Odd(what="steps"), "steps must be a whole number of at least 1"),
        (Odd(what="gone"), "Odd.recipe fails: KeyError"),
        (Bare(), "Bare is not declared: put @declared above it"),
        (Speechless(), "test-speechless attacks sentences, not pictures"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_strangers_mistake_is_one_line(task: fv.Task, attack: Any, said: str) -> None:
    with pytest.raises(FedveilError, match=said) as raised:
        fv.audit(task, "clip", attack)
    assert "\n" not in str(raised.value)
