"""Roles differ in what they are given and in nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedveil as fv
from fedveil.attacks.problem import LocalSteps, Reconstruction
from fedveil.auditing.attacking import Scene, noise_like, problems_by_role, run_roles
from fedveil.auditing.captures import CaptureSetting, check_captures
from fedveil.auditing.kept import Found, kept
from fedveil.clients.engine import Engine
from fedveil.defenses.base import Facts
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture
from fedveil.streams import Streams
from fedveil.tasks.models.mlp import MLP
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


# ---- files of strangers ----------------------------------------------------------------------------------------

STEPS = torch.zeros(2, 1), torch.zeros(1, 2, 1, 4)  # costs and iterates of one noted step
FACTS = {"model": "mlp:hidden=[3]", "shape": [1, 4, 4], "classes": 3, "mean": [0.5], "std": [0.2], "local_epochs": 1}


def captured(**facts: object) -> Capture:
    model = MLP(hidden=(3,)).build((1, 4, 4), 3)
    row = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Capture(
        kind="gradient",
        before=row,
        shared=row,
        client=0,
        round=1,
        lr=(0.1,),
        batch_sizes=(2,),
        facts={**FACTS, **facts},
    )


@pytest.mark.parametrize(
    "facts, line",
    [
        ({"shape": [1, 2**20, 2**20]}, "does not fit the model"),  # would take terabytes
        ({"shape": [-1, 4, 4]}, "the capture's shape is not usable"),
        ({"shape": [True, 4, 4]}, "the capture's shape is not usable"),
        ({"shape": "444"}, "the capture's shape is not usable"),
        ({"shape": [2**30] * 3}, "the capture's model cannot be built"),
        ({"classes": 2**40}, "the capture's classes is not usable"),
        ({"classes": "x" * 5000}, "the capture's classes is not usable"),
        ({"model": {"hidden": [3]}}, "does not name its model"),
        ({"model": "mlp:hidden=[2000000000]"}, "does not fit the model"),
        ({"mean": "x"}, "the capture's mean is not usable"),
        ({"std": ["x"]}, "the capture's std is not usable"),
        ({"std": [10**400]}, "the capture's std is not usable"),
        ({"local_epochs": "two"}, "the capture's local_epochs is not usable"),
        ({"defense": [1] * 5000}, "the capture's defense is not usable"),
    ],
    ids=str,
)
def test_what_a_capture_says_of_itself_is_not_trusted(facts: dict[str, object], line: str) -> None:
    check_captures([captured()], CaptureSetting())
    with pytest.raises(FedveilError, match=line) as caught:
        check_captures([captured(**facts)], CaptureSetting())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_a_kept_attack_is_taken_only_as_it_was_written(tmp_path: Path) -> None:
    path, runs = tmp_path / "attacks" / "one", []

    def attack() -> Found:
        runs.append(1)
        return {
            "naive": Reconstruction(torch.rand(2, 1, 4), torch.zeros(2, 1), torch.rand(2), [0], *STEPS, seconds=1.0)
        }

    first = kept(path, {"a": 1}, True, attack)
    again = kept(path, {"a": 1}, True, attack)
    assert len(runs) == 1
    assert torch.equal(first["naive"].inputs, again["naive"].inputs)
    assert again["naive"].inputs.data_ptr() % 64 == again["naive"].costs.data_ptr() % 64 == 0  # as torch's own tensors
    content = path.read_bytes()
    for place in (8, 60, 200, len(content) // 2, len(content) - 1):  # anywhere in the header and in the values
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        kept(path, {"a": 1}, True, attack)
    assert len(runs) == 6
    kept(path, {"a": 2}, True, attack)
    assert len(runs) == 7
