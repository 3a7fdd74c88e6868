"""Audits in stages: what a second one computes again, what is never taken for the same, what fitting may see."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.lab import Lab
from fedveil.attacks.scene import Scene
from fedveil.auditing import training
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.observing import observe
from fedveil.auditing.store import Store
from fedveil.auditing.training import train_both
from fedveil.auditing.workshop import Workshop
from fedveil.federation import prepare as preparing
from fedveil.federation.observers import Watch
from fedveil.federation.plan import Plan
from fedveil.workers import Workers

from .learning import Nearest

ATTACK = "inverting-gradients:steps=12"
FEDERATION = fv.FederationSettings(rounds=2, batch_size=32)
SETTINGS = fv.AuditSettings(victims=3, candidates=10, reference="none")


@pytest.fixture(scope="module")
def task() -> fv.Task:
    return fv.task("digits", model="mlp:hidden=[16],activation=sigmoid", clients=2)


def audit(task: fv.Task, store: Store, defense: Any = "gaussian-noise", **more: Any) -> AuditResult:
    given: dict[str, Any] = {"federation": FEDERATION, "settings": SETTINGS, "backend": "stacked"} | more
    store.made.clear()
    return fv.audit(task, defense, given.pop("attack", ATTACK), store=store, **given)


def counted(store: Store) -> Counter[str]:
    return Counter(stage for stage, _ in store.made)


def values(found: AuditResult) -> list[dict[str, list[float]]]:
    return [row.values for row in found.result.rows]


# ---- computed once -----------------------------------------------------------------------------------------


def test_what_a_second_audit_with_another_defense_computes_again(task: fv.Task, tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = audit(task, store, "gradient-dropout:keep=0.6")
    assert counted(store) == {"train": 2, "observe": 1, "attack": 8, "score": 9}
    second = audit(task, store, "gaussian-noise:sigma=0.1")
    # Its own run and updates, and both attacks of those who face its defense: no ceiling, no floor, no undefended run.
    assert counted(store) == {"train": 1, "observe": 1, "attack": 4, "score": 4}
    assert {about.split(", ")[1] for stage, about in store.made if stage == "attack"} == {"naive", "adaptive"}
    for role in ("ceiling", "noise-floor", "mean-floor"):
        one, other = first.result.row(role), second.result.row(role)  # type: ignore[arg-type]
        assert one is not None
        assert other is not None
        assert one.values == other.values
    again = audit(task, store, "gradient-dropout:keep=0.6")
    assert store.made == []
    assert values(again) == values(first)
    alone = audit(task, Store(), "gaussian-noise:sigma=0.1")
    assert values(alone) == values(second)  # as if nothing had been kept


def test_another_threshold_is_judged_anew_and_nothing_else(task: fv.Task, tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = audit(task, store, train=False)
    strict = audit(task, store, train=False, settings=dataclasses.replace(SETTINGS, exposed_above=0.999))
    assert store.made == []
    assert first.result.verdict.thresholds != strict.result.verdict.thresholds


def test_an_audit_that_was_stopped_goes_on(task: fv.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)

    class Stop(Exception):
        pass

    def stop(*given: Any) -> None:
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(fv.attacks.LinkTest, "run", stop)
        with pytest.raises(Stop):
            audit(task, store)
    whole = audit(task, store)
    assert counted(store) == {"attack": 4, "score": 4}  # the link test
    assert values(whole) == values(audit(task, Store()))


def test_a_stop_in_the_midst_of_an_attack_loses_one_role(
    task: fv.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, whole = Store(tmp_path), fv.attacks.InvertingGradients.run
    runs = []

    class Stop(Exception):
        pass

    def stops(self: Attack, scene: Scene, fitted: Any = None) -> Reconstruction:
        runs.append(scene.count)
        if len(runs) == 3:
            raise Stop
        return whole(self, scene, fitted)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(fv.attacks.InvertingGradients, "run", stops)
        with pytest.raises(Stop):
            audit(task, store, train=False)
    found = audit(task, store, train=False)
    done = [about.split(", ")[1] for stage, about in store.made if stage == "attack" and about.startswith("inverting")]
    assert done == ["adaptive", "noise-floor"]
    assert values(found) == values(audit(task, Store(), train=False))


def test_a_role_of_a_kept_attack_equals_the_role_that_was_run_alone(task: fv.Task, tmp_path: Path) -> None:
    """Naive alone, then both: the naive one is taken from the store; and it is what it is without a store."""
    store = Store(tmp_path)
    audit(task, store, train=False, settings=dataclasses.replace(SETTINGS, attackers="naive"))
    both = audit(task, store, train=False)
    assert {about.split(", ")[1] for stage, about in store.made if stage == "attack"} == {"adaptive"}
    assert values(both) == values(audit(task, Store(), train=False))


def test_engines_dry_steps_and_checks_are_made_once(task: fv.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            made[name] += 1
            return function(*given, **named)

        return called

    for name in ("engine_for", "dry_step"):
        monkeypatch.setattr(preparing, name, counting(name, getattr(preparing, name)))
    monkeypatch.setattr(Plan, "check", counting("check", Plan.check))
    audit(task, Store())
    assert made == {"engine_for": 1, "dry_step": 2, "check": 2}  # a step and a check for each of the two chains


# ---- never taken for the same ------------------------------------------------------------------------------


def own_task(seed: int = 0, loss: Any = None, model: nn.Module | None = None, test_seed: int | None = None) -> fv.Task:
    def images(seed: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(count, 1, 6, 6, generator=generator), torch.arange(count) % 4

    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Sigmoid(), nn.Linear(8, 4))
    data = (images(seed, 96), images(1000 + (seed if test_seed is None else test_seed), 60))
    return fv.Task(model=model, data=data, clients=2, **({"loss": loss} if loss else {}))


def softer(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs / 4, targets)


softer.__name__ = "cross_entropy"


class Gate(nn.Module):
    """One class, one state, another forward."""

    def __init__(self, by: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Sigmoid(), nn.Linear(8, 4))
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return self.by * self.body(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "first, other",
    [
        (own_task, lambda: own_task(seed=1)),
        (own_task, lambda: own_task(loss=softer)),
        (lambda: own_task(model=Gate(1.0)), lambda: own_task(model=Gate(0.3))),
    ],
    ids=["data", "loss", "forward"],
)
def test_what_is_not_the_same_is_computed(
    first: Callable[[], fv.Task], other: Callable[[], fv.Task], tmp_path: Path
) -> None:
    store = Store(tmp_path)
    kept = values(audit(first(), store, "gaussian-noise"))
    expected = values(audit(other(), Store(), "gaussian-noise"))
    assert values(audit(other(), store, "gaussian-noise")) == expected != kept
    assert counted(store)["train"] == 2
    assert counted(store)["attack"] == 8


def test_a_newer_attack_or_defense_is_another_one(
    task: fv.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedveil.auditing.keys import implementation

    store = Store(tmp_path)
    audit(task, store, train=False)
    with monkeypatch.context() as patched:
        implementation.cache_clear()
        patched.setattr(fv.attacks.InvertingGradients, "revision", fv.attacks.InvertingGradients.revision + 1)
        audit(task, store, train=False)
        assert {about.split(", ")[0] for stage, about in store.made if stage == "attack"} == {"inverting-gradients"}
    with monkeypatch.context() as patched:
        implementation.cache_clear()
        patched.setattr(fv.defenses.GaussianNoise, "revision", 2, raising=False)
        audit(task, store, train=False)
        assert counted(store)["observe"] == 1
    implementation.cache_clear()


def test_which_rounds_are_recorded_does_not_change_a_run(task: fv.Task, tmp_path: Path) -> None:
    """The run without a defense is kept for an audit that attacks another round, and its own starts are trained for."""
    store = Store(tmp_path)
    audit(task, store)
    audit(task, store, settings=dataclasses.replace(SETTINGS, rounds=(2,)))
    trained = [about for stage, about in store.made if stage == "train"]
    assert len(trained) == 1
    assert "gaussian-noise" in trained[0]


# ---- later rounds ------------------------------------------------------------------------------------------


def test_a_later_round_is_observed_at_the_model_that_was_trained_under_the_defense(task: fv.Task) -> None:
    settings = dataclasses.replace(SETTINGS, rounds=(2,))
    experiment = fv.Experiment(
        task=task, defense="gaussian-noise:sigma=1", federation=FEDERATION, audit=settings, backend="stacked"
    )
    shop = Workshop.open(experiment, Store(), Workers(1), Watch())
    bare, defended = train_both(shop)
    assert defended is not None
    assert bare is not None
    seen = observe(shop, 2, defended)
    for updates in (seen.defended, seen.undefended):
        for name, tensor in defended.starts[2][0].items():
            assert torch.equal(updates.before.row(0)[name], tensor)
    alone = training.trained(shop, shop.plain, "", (2,))
    assert any(not torch.equal(alone.starts[2][0][name], tensor) for name, tensor in defended.starts[2][0].items())


# ---- fitting -----------------------------------------------------------------------------------------------


def test_a_learned_attack_that_matches_nothing_goes_the_whole_way(task: fv.Task, tmp_path: Path) -> None:
    store = Store(tmp_path)
    found = audit(task, store, attack=Nearest(), train=False)
    assert counted(store)["fit"] == 2  # with the defense, and without for all others
    ceiling, floor = found.leakage["ceiling", "psnr", "test-nearest"], found.leakage["noise-floor", "psnr"]
    assert ceiling.mean > floor.mean + 2
    assert "attack_loss" not in next(row for row in found.result.rows if row.attack == "test-nearest").metrics


def test_what_is_learned_is_learned_once_without_a_store_too(task: fv.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    labs: list[Lab] = []
    learn = Nearest.fit

    def counting(self: Nearest, lab: Lab) -> dict[str, Tensor]:
        labs.append(lab)
        return learn(self, lab)

    monkeypatch.setattr(Nearest, "fit", counting)
    audit(task, Store(), attack=Nearest(), train=False)
    assert [len(lab.chain.defenses) for lab in labs] == [0, 1]  # of all who know no defense, and of the one who does
    labs.clear()
    monkeypatch.setattr(Nearest, "learns_about", frozenset({"model"}))
    rounds = {"settings": dataclasses.replace(SETTINGS, rounds=(1, 2))}
    audit(task, Store(), attack=Nearest(), **rounds)
    assert [len(lab.chain.defenses) for lab in labs] == [0, 0]  # one for each model
    labs.clear()
    monkeypatch.setattr(Nearest, "learns_about", frozenset())
    audit(task, Store(), attack=Nearest(), **rounds)
    assert len(labs) == 1


def test_what_an_attack_reads_from_files_is_part_of_its_key(
    task: fv.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    audit(task, store, attack=Nearest(), train=False)
    monkeypatch.setattr(Nearest, "content", "another file")
    audit(task, store, attack=Nearest(), train=False)
    made = counted(store)
    assert (made["fit"], made["attack"]) == (2, 4)


def test_fitting_never_sees_a_victim(tmp_path: Path) -> None:
    """Other victims, same auxiliary data: what was learned is not learned again."""
    store = Store(tmp_path)
    audit(own_task(seed=0, test_seed=7), store, "clip", attack=Nearest(), train=False)
    assert counted(store)["fit"] == 2
    audit(own_task(seed=1, test_seed=7), store, "clip", attack=Nearest(), train=False)
    made = counted(store)
    assert made["fit"] == 0
    assert made["attack"] == 8  # while every attack is another one


def test_without_auxiliary_data_a_learned_attack_is_skipped_and_named() -> None:
    generator = torch.Generator().manual_seed(0)
    train = torch.rand(40, 1, 6, 6, generator=generator), torch.arange(40) % 4
    test = torch.rand(1, 1, 6, 6, generator=generator), torch.tensor([0])
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    task = fv.Task(model=model, data=(train, test), clients=2)
    found = audit(task, Store(), "clip", attack=[ATTACK, Nearest()], train=False)
    assert found.result.not_tried[0] == "the attack test-nearest: there are no auxiliary data for it to learn from"
    assert "test-nearest" not in {row.attack for row in found.result.rows}
