"""What an audit tells beside its numbers: other models' utility, how far inputs move; what its attacker is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedveil as fv
from fedveil.attacks.scene import Scene
from fedveil.auditing.attacking import scenes_by_role
from fedveil.auditing.observing import observe
from fedveil.auditing.store import Store
from fedveil.auditing.workshop import Workshop
from fedveil.defenses.base import Facts
from fedveil.federation.observers import Watch
from fedveil.federation.own_models import LOCAL
from fedveil.streams import Streams
from fedveil.workers import Workers

ATTACK = "inverting-gradients:steps=4"


@pytest.fixture(scope="module")
def task() -> fv.Task:
    return fv.task("digits", model="mlp:hidden=[32],activation=sigmoid", clients=3)


def test_local_models_stand_beside_the_federations(task: fv.Task, tmp_path: Path) -> None:
    federation = fv.FederationSettings(protocol="fedavg", rounds=2, batch_size=16, local_utility=2)
    settings = fv.AuditSettings(victims=2, batch_size=1)
    outcome = fv.audit(task, "spm", ATTACK, federation=federation, settings=settings, backend="stacked")
    found = outcome.result.cost.beside[LOCAL]
    assert set(found) == {"defended", "undefended"}
    assert outcome.result.cost.defended is not None
    assert found["defended"] > outcome.result.cost.defended.mean
    page = outcome.report(tmp_path / "report.html").read_text()
    assert f"Test accuracy of {LOCAL}, not of the federation&#39;s model" in page
    assert f"{100 * found['defended']:.1f}" in page
    plain = fv.audit(task, None, ATTACK, federation=federation, settings=settings, backend="stacked")
    assert set(plain.result.cost.beside[LOCAL]) == {"undefended"}


def test_the_card_of_a_data_defense_says_how_far_pixels_move(task: fv.Task, tmp_path: Path) -> None:
    settings = fv.AuditSettings(victims=2, batch_size=1)
    told = {}
    for defense in ("fedem:steps=2", "gaussian-noise"):
        outcome = fv.audit(task, defense, ATTACK, settings=settings, train=False, backend="stacked")
        told[defense] = outcome.result.defense.facts.get("the perturbation of the inputs")
    assert told["gaussian-noise"] is None
    assert told["fedem:steps=2"] is not None
    assert "0.0314 in the model's input space" in told["fedem:steps=2"]
    assert told["fedem:steps=2"].startswith("a pixel moves by ")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_informed_attacker_of_weights_knows_those_that_were_sent(task: fv.Task, momentum: float) -> None:
    federation = fv.FederationSettings(protocol="fedavg", local_epochs=3, lr=0.05, momentum=momentum)
    settings, chain = fv.AuditSettings(victims=2, batch_size=1), fv.Chain.of("spm")
    experiment = fv.Experiment(task=task, defense=chain, federation=federation, audit=settings, trains=False)
    shop = Workshop.open(experiment, Store(), Workers(1), Watch())
    observed = observe(shop, 1, None)
    defended, undefended = observed.defended.gradient, observed.undefended.gradient
    scene = Scene(shop.case.public, observed.defended, Streams.seeded(0, range(2)))
    informed = scenes_by_role(scene, chain, None)["adaptive"].knowledge()
    facts = Facts(kind="weights", steps=3, lr=0.05, momentum=momentum, before=observed.defended.before)
    expected = chain.knowledge(defended, facts)
    for name in observed.defended.before:
        torch.testing.assert_close(informed.target[name], expected.target[name])
    near, far = (float((tree - undefended).norm().sum()) for tree in (informed.target, defended))
    assert near < 0.5 * far
