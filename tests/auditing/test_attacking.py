"""Roles differ in what they are given and in nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedveil as fv
from fedveil.attacks.problem import LocalSteps
from fedveil.auditing.attacking import Scene, noise_like, problems_by_role, run_roles
from fedveil.clients.engine import Engine
from fedveil.defenses.base import Facts
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tree import Tree


@pytest.fixture(scope="module")
def scene_and_updates() -> tuple[Scene, Tree, Tree]:
    task = fv.task("digits", model="mlp:hidden=[16]", clients=2)
    inputs, targets = task.test.batch([0, 1, 2])
    params = Tree.expand({name: p.detach() for name, p in task.model.named_parameters()}, 3)
    engine = Engine(task.model, task.loss, backend="stacked")
    streams = Streams.seeded(0, range(3))
    true = engine.gradient(params, Tree({}), inputs[:, None], targets[:, None], streams).update
    assert task.normalization is not None
    scene = Scene(
        model=task.model,
        loss=task.loss,
        params=params,
        buffers=Tree({}),
        shape=task.shape,
        batch_size=1,
        classes=task.classes,
        normalization=task.normalization,
        facts=Facts(),
        streams=Streams.seeded(1, range(3), "attack"),
        labels=targets[:, None],
    )
    return scene, true, true.map(lambda g: g + 0.01 * streams.normal_like(g))


def test_roles_of_a_defended_update(scene_and_updates: tuple[Scene, Tree, Tree]) -> None:
    scene, true, shared = scene_and_updates
    chain = Chain.of("gradient-dropout:sigma=0.01")
    problems = problems_by_role(scene, chain, defended=shared, undefended=true)
    assert list(problems) == ["ceiling", "naive", "adaptive", "noise-floor"]
    assert problems["ceiling"].target is true
    assert problems["naive"].target is shared
    assert all(bool((w == 1).all()) for w in problems["naive"].weight.values())
    assert not all(bool((w == 1).all()) for w in problems["adaptive"].weight.values())
    assert torch.allclose(problems["noise-floor"].target.norm(), true.norm(), rtol=1e-5)
    assert list(problems_by_role(scene, chain, defended=shared, undefended=true, attackers="naive"))[1] == "naive"
    assert list(problems_by_role(scene, Chain(()), defended=shared, undefended=true)) == ["ceiling", "noise-floor"]
    with pytest.raises(FedveilError, match="no update"):
        problems_by_role(scene, chain, defended=None, undefended=None)


def test_the_floor_knows_nothing_of_the_update(scene_and_updates: tuple[Scene, Tree, Tree]) -> None:
    scene, true, _ = scene_and_updates
    noise = noise_like(true, scene.streams.fold("floor"))
    cosine = true.dot(noise) / (true.norm() * noise.norm())
    assert float(cosine.abs().max()) < 4 / true.size**0.5


def test_roles_run_together_as_they_would_alone(scene_and_updates: tuple[Scene, Tree, Tree]) -> None:
    scene, true, shared = scene_and_updates
    problems = problems_by_role(scene, Chain.of("gaussian-noise:sigma=0.01"), defended=shared, undefended=true)
    attack = fv.InvertingGradients(steps=5)
    together = run_roles(attack, problems, backend="stacked")
    for role, problem in problems.items():
        alone = attack.run(replace(problem, streams=Streams.seeded(1, range(3), "attack")), backend="stacked")
        assert torch.allclose(together[role].inputs, alone.inputs, atol=1e-4), role


def test_unrolled_local_steps_reach_the_engine(scene_and_updates: tuple[Scene, Tree, Tree]) -> None:
    scene, true, _ = scene_and_updates
    local = LocalSteps(steps=2, batch_size=1, lr=0.5)
    plain = fv.InvertingGradients(steps=3).run(scene.problem(true), backend="stacked")
    unrolled = fv.InvertingGradients(steps=3).run(replace(scene, local=local).problem(true), backend="stacked")
    assert not torch.equal(plain.inputs, unrolled.inputs)
