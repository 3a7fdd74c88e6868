"""Roles differ in what they are given and in nothing else, and the key of an attack is its content."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.attacks.base import Attack
from fedveil.attacks.problem import Problem
from fedveil.attacks.scene import Candidates, LocalSteps, Public, Scene, Workbench
from fedveil.auditing.attacking import Shown, noise_like, scene_of, scenes_by_role
from fedveil.auditing.case import Case
from fedveil.auditing.keys import attack_key
from fedveil.auditing.store import Store
from fedveil.clients.engine import Engine
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates
from fedveil.leakage.modalities import modality
from fedveil.streams import Streams
from fedveil.tasks.layout import Layout
from fedveil.tree import Tree


@pytest.fixture(scope="module")
def scene_and_true() -> tuple[Scene, Updates]:
    """The scene of three defended updates, and the updates without the defense."""
    task = fv.task("digits", model="mlp:hidden=[16]", clients=2)
    inputs, targets = task.test.batch([0, 1, 2])
    assert isinstance(inputs, Tensor)
    params = Tree.expand({name: p.detach() for name, p in task.model.named_parameters()}, 3)
    engine = Engine(task.model, task.loss, backend="stacked")
    streams = Streams.seeded(0, range(3))
    gradient = engine.gradient(params, Tree({}), inputs[:, None], targets[:, None], streams).update
    assert task.normalization is not None
    public = Public(task.model, task.loss, Layout("pictures", task.shape, task.normalization.box()), task.classes)
    true = Updates("gradient", params, gradient, Tree({}), (0.1,), (1,))
    shared = replace(true, message=gradient.map(lambda g: g + 0.01 * streams.normal_like(g)))
    scene = Scene(public, shared, Streams.seeded(1, range(3), "attack"), labels=targets[:, None])
    return replace(scene, bench=Workbench(backend="stacked")), true


def test_roles_of_a_defended_update(scene_and_true: tuple[Scene, Updates]) -> None:
    scene, true = scene_and_true
    chain = Chain.of("gradient-dropout:sigma=0.01")
    scenes = scenes_by_role(scene, chain, true)
    assert list(scenes) == ["ceiling", "naive", "adaptive", "noise-floor"]
    problems = {role: Problem.of(each) for role, each in scenes.items()}
    assert problems["ceiling"].target is true.message
    assert problems["naive"].target is scene.updates.message
    assert all(bool((w == 1).all()) for w in problems["naive"].weight.values())
    assert not all(bool((w == 1).all()) for w in problems["adaptive"].weight.values())
    assert torch.allclose(problems["noise-floor"].target.norm(), true.message.norm(), rtol=1e-5)
    assert list(scenes_by_role(scene, chain, true, "naive")) == ["ceiling", "naive", "noise-floor"]
    assert list(scenes_by_role(scene, Chain(), true)) == ["ceiling", "noise-floor"]
    assert list(scenes_by_role(scene, chain, None)) == ["naive", "adaptive", "noise-floor"]
    assert list(scenes_by_role(scene, Chain(), None)) == ["naive", "noise-floor"]


def test_roles_get_equal_streams(scene_and_true: tuple[Scene, Updates]) -> None:
    scene, true = scene_and_true
    draws = [each.streams.fold("start", 0).normal(4) for each in scenes_by_role(scene, Chain.of("spm"), true).values()]
    assert len(draws) == 4
    assert all(torch.equal(each, draws[0]) for each in draws)


@pytest.mark.parametrize("kind", ["gradient", "delta", "weights"])
def test_the_floor_knows_nothing_of_the_update(scene_and_true: tuple[Scene, Updates], kind: Any) -> None:
    scene, true = scene_and_true
    noise = noise_like(true.gradient, scene.streams.fold("floor"))
    cosine = true.gradient.dot(noise) / (true.gradient.norm() * noise.norm())
    assert float(cosine.abs().max()) < 4 / true.gradient.size**0.5
    sent = replace(true, kind=kind)
    floor = scenes_by_role(replace(scene, updates=sent), Chain(), sent)["noise-floor"].updates
    torch.testing.assert_close(floor.gradient.norm(), sent.gradient.norm(), rtol=1e-4, atol=0)


def test_the_informed_attacker_of_fedbarre_repeats_the_local_steps(scene_and_true: tuple[Scene, Updates]) -> None:
    scene, true = scene_and_true
    chain = Chain.of("fedbarre:models=3")
    known = Problem.of(scenes_by_role(scene, chain, true)["adaptive"])
    assert [each.steps for each in known.before] == [1, 2, 3]
    attack = fv.attacks.InvertingGradients(steps=3, restarts=1)
    naive, informed = (replace(scene, chain=each) for each in (Chain(), chain))
    assert not torch.equal(attack.run(naive).inputs, attack.run(informed).inputs)
    assert attack.estimate(informed).steps == (1 + 3) * attack.estimate(naive).steps  # the naive way, too


def test_unrolled_local_steps_reach_the_engine(scene_and_true: tuple[Scene, Updates]) -> None:
    scene, _ = scene_and_true
    local = LocalSteps((0.5, 0.5), (1, 1), 2)
    attack = fv.attacks.InvertingGradients(steps=3)
    assert not torch.equal(attack.run(scene).inputs, attack.run(replace(scene, local=local)).inputs)


def test_labels_do_not_tell_the_order_of_local_steps(scene_and_true: tuple[Scene, Updates]) -> None:
    """Who is told the labels is not told which of them shared a batch."""
    scene, _ = scene_and_true
    labels = torch.tensor([[3, 1, 2, 1]]).expand(scene.count, 4)
    attack = fv.attacks.InvertingGradients()

    def told(updates: Updates, **settings: Any) -> torch.Tensor | None:
        case = Case("", scene.public, modality("pictures"), fv.AuditSettings(**settings), Store(), scene.bench)
        return scene_of(case, attack, Shown(updates, labels)).labels

    def steps(*sizes: int) -> Updates:
        return replace(scene.updates, kind="delta", lr=(0.1,) * len(sizes), batch_sizes=sizes)

    found = told(steps(2, 2))
    assert found is not None
    assert found.tolist() == [[1, 1, 2, 3]] * scene.count
    for same in (told(steps(4)), told(scene.updates), told(steps(2, 2), local_steps="pseudo-gradient")):
        assert same is not None
        assert torch.equal(same, labels)


# ---- what a kept attack is known by ---------------------------------------------------------------------------


def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * nn.functional.cross_entropy(outputs, targets)


class Turned(nn.Sequential):
    """The same layers, another forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(-1))  # type: ignore[no-any-return]


def test_the_key_of_an_attack_is_its_content(scene_and_true: tuple[Scene, Updates]) -> None:
    scene, true = scene_and_true
    attack, public, updates = fv.attacks.InvertingGradients(steps=5), scene.public, scene.updates
    link = fv.attacks.LinkTest()

    def key(changed: Scene = scene, by: Attack = attack, fitted: str = "") -> str:
        return attack_key(by, changed, fitted)

    def seen(**changed: Any) -> str:
        return key(replace(scene, updates=replace(updates, **changed)))

    def told(**changed: Any) -> str:
        return key(replace(scene, public=replace(public, **changed)))

    same = replace(updates, message=updates.message.map(torch.clone))
    model = copy.deepcopy(public.model)
    streams = Streams.seeded(1, range(3), "attack")
    copied = replace(scene, updates=same, public=replace(public, model=model), streams=streams)
    assert key() == key(copied)
    assert key() == key(replace(scene, bench=Workbench(backend="stacked", report=lambda done, total: None)))
    assert scene.labels is not None
    assert public.layout.box is not None
    low, high = public.layout.box
    others = Candidates(torch.rand(3, 4, 1, 1, 8, 8), torch.zeros(3, 4, 1, dtype=torch.int64))
    found = [
        key(by=fv.attacks.InvertingGradients(steps=6)),
        key(by=fv.attacks.InvertingGradients(steps=5, restarts=7)),
        key(by=link),
        key(fitted="something learned"),
        key(replace(scene, bench=Workbench(backend="compiled"))),
        key(replace(scene, bench=Workbench(backend="stacked", chunk=2))),
        seen(message=true.message),
        seen(before=updates.before * 1.01),
        seen(buffers=Tree({"b": torch.ones(3, 1)})),
        seen(lr=(0.2,)),
        seen(batch_sizes=(2,)),
        key(replace(scene, labels=(scene.labels + 1) % 10)),
        key(replace(scene, labels=None)),
        told(layout=replace(public.layout, box=(low, 2 * high))),
        told(classes=11),
        told(loss=doubled),
        told(model=Turned(*public.model.children())),
        key(replace(scene, streams=Streams.seeded(2, range(3), "attack"))),
        key(replace(scene, streams=Streams.seeded(1, range(1, 4), "attack"))),
        key(replace(scene, local=LocalSteps((0.5, 0.5), (1, 1), 2))),
        key(replace(scene, local=LocalSteps((0.5, 0.5), (1, 1), 2, order="mean"))),
        key(replace(scene, chain=Chain.of("clip"))),
        key(replace(scene, chain=Chain.of("clip:norm=2"))),
        key(replace(scene, candidates=others)),
        key(replace(scene, candidates=replace(others, labels=others.labels + 1))),
    ]
    assert [each for place, each in enumerate(found) if each in {key(), *found[:place]}] == []
