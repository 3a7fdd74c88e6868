"""Roles differ in what they are given and in nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fedveil.auditing.kept import Found, content_key, kept
from torch import nn

import fedveil as fv
from fedveil.attacks.base import Attack
from fedveil.attacks.problem import LocalSteps, Problem, Reconstruction
from fedveil.auditing.attacking import Scene, noise_like, problems_by_role, run_roles
from fedveil.auditing.captures import CaptureSetting, attack_captures, check_captures, steps_alike
from fedveil.clients.engine import Backend, Engine
from fedveil.defenses.base import Facts, StepsBefore
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture
from fedveil.registry import models
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
    attack = fv.attacks.InvertingGradients(steps=5)
    together = run_roles(attack, problems, backend="stacked")
    for role, problem in problems.items():
        alone = attack.run(replace(problem, streams=Streams.seeded(1, range(3), "attack")), backend="stacked")
        assert torch.allclose(together[role].inputs, alone.inputs, atol=1e-4), role


def test_unrolled_local_steps_reach_the_engine(scene_and_updates: tuple[Scene, Tree, Tree]) -> None:
    scene, true, _ = scene_and_updates
    local = LocalSteps(steps=2, batch_size=1, lr=0.5)
    plain = fv.attacks.InvertingGradients(steps=3).run(scene.problem(true), backend="stacked")
    unrolled = fv.attacks.InvertingGradients(steps=3).run(replace(scene, local=local).problem(true), backend="stacked")
    assert not torch.equal(plain.inputs, unrolled.inputs)


# ---- what a kept attack is known by ---------------------------------------------------------------------------


def doubled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 2 * torch.nn.functional.cross_entropy(outputs, targets)


class Turned(torch.nn.Sequential):
    """The same layers, another forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flip(-1))  # type: ignore[no-any-return]


def test_the_key_of_an_attack_is_its_content(scene_and_updates: tuple[Scene, Tree, Tree]) -> None:
    scene, true, shared = scene_and_updates
    attack, problem = fv.attacks.InvertingGradients(steps=5), scene.problem(true)

    def key(changed: Problem = problem, by: Attack = attack, backend: Backend = "stacked") -> str:
        return content_key(by, {"naive": changed}, backend)

    def replay(factor: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return lambda inputs, noise: inputs + factor * noise

    copied = problem.target.map(torch.clone)
    streams = Streams.seeded(1, range(3), "attack")
    assert key() == key(replace(problem, model=copy.deepcopy(problem.model), target=copied, streams=streams))
    assert content_key(attack, {"ceiling": problem}, "stacked") != key()
    assert problem.labels is not None
    assert problem.box is not None
    low, high = problem.box
    others = [
        key(by=fv.attacks.InvertingGradients(steps=6)),
        key(by=fv.attacks.InvertingGradients(steps=5, restarts=7)),
        key(backend="compiled"),
        key(replace(problem, target=shared)),
        key(replace(problem, weight=problem.weight * 0.5)),
        key(replace(problem, params=problem.params * 1.01)),
        key(replace(problem, buffers=Tree({"b": torch.ones(3, 1)}))),
        key(replace(problem, labels=(problem.labels + 1) % 10)),
        key(replace(problem, labels=None)),
        key(replace(problem, box=(low, 2 * high))),
        key(replace(problem, classes=11)),
        key(replace(problem, streams=Streams.seeded(2, range(3), "attack"))),
        key(replace(problem, streams=Streams.seeded(1, range(1, 4), "attack"))),
        key(replace(problem, loss=doubled)),
        key(replace(problem, model=Turned(*problem.model.children()))),
        key(replace(problem, local=LocalSteps(steps=2, batch_size=1, lr=0.5))),
        key(replace(problem, simulate=(replay(1.0),))),
        key(replace(problem, simulate=(replay(2.0),))),
        key(replace(problem, before=(StepsBefore(1, 0.1),))),
    ]
    assert [other for place, other in enumerate(others) if other in {key(), *others[:place]}] == []


# ---- files of strangers ----------------------------------------------------------------------------------------

STEPS = torch.zeros(2, 1), torch.zeros(1, 2, 1, 4)  # costs and iterates of one noted step
FACTS = {"model": "mlp:hidden=[3]", "shape": [1, 4, 4], "classes": 3, "mean": [0.5], "std": [0.2], "local_epochs": 1}


def captured(facts: dict[str, object] | None = None, **changed: Any) -> Capture:
    model = MLP(hidden=(3,)).build((1, 4, 4), 3)
    row = {name: parameter.detach() for name, parameter in model.named_parameters()}
    fields: dict[str, Any] = {"kind": "gradient", "before": row, "shared": row, "lr": (0.1,), "batch_sizes": (2,)}
    return Capture(**{**fields, **changed}, client=0, round=1, facts={**FACTS, **(facts or {})})


def local(sizes: tuple[int, ...], lr: float = 0.1, **facts: object) -> Capture:
    """The update after local steps of these sizes."""
    return captured(facts, kind="weights", steps=len(sizes), lr=(lr,) * len(sizes), batch_sizes=sizes)


@pytest.mark.parametrize(
    "facts, line",
    [
        ({"shape": [1, 2**19, 2**20]}, "does not fit the model"),  # would take terabytes
        ({"shape": [1, 4, 4, 1, 1]}, "not inputs of \\(1, 4, 4, 1, 1\\)"),
        ({"shape": [16], "mean": None, "std": None}, "shape \\(channels, height, width\\), not inputs of \\(16,\\)"),
        ({"shape": None}, "does not tell the shape of an input"),
        ({"classes": None}, "does not tell the number of classes"),
        ({"model": None}, "does not name its model"),
        ({"model": {"hidden": [3]}}, "does not name its model"),
        ({"model": {"name": "mlp", "hiden": [3]}}, "no field 'hiden'"),
        ({"model": "mlp:hidden=[2000000000]"}, "does not fit the model"),
        ({"model": "bert"}, "bert"),
        ({"loss": "mse_loss"}, "made under the loss 'mse_loss', not cross-entropy"),
        ({"defense": "dropout"}, "unknown defense 'dropout'"),
    ],
    ids=str,
)
def test_what_a_capture_says_of_itself_is_not_trusted(facts: dict[str, object], line: str) -> None:
    check_captures([captured()], CaptureSetting())
    with pytest.raises(FedveilError, match=line) as caught:
        check_captures([captured(facts)], CaptureSetting())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_what_an_attack_would_need_is_told_before_it_starts() -> None:
    many = captured(batch_sizes=(10**6,))
    with pytest.raises(
        FedveilError, match=r"50,000 x 1,000,000 examples of shape \(1, 4, 4\) needs .* GiB or more"
    ) as caught:
        check_captures([many] * 50_000, CaptureSetting())
    assert "this machine has" in str(caught.value)


def test_an_input_of_another_shape_does_not_go_through_the_model() -> None:
    """A convolution fits any picture; what follows it does not."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 2 * 2, 3))
    row = {name: parameter.detach() for name, parameter in model.named_parameters()}
    capture = captured(before=row, shared=row)
    assert check_captures([capture], CaptureSetting(model=model)).classes == 3
    for shape, said in (((1, 5, 4), "does not take inputs of shape"), ((1, 2, 2), "does not take inputs of shape")):
        with pytest.raises(FedveilError, match=said):
            check_captures([capture], CaptureSetting(model=model, shape=shape))
    with pytest.raises(FedveilError, match=r"normalization is of 1 channels, an input's shape is \(2, 4, 4\)"):
        check_captures([capture], CaptureSetting(model=model, shape=(2, 4, 4)))
    with pytest.raises(FedveilError, match="tells 3 classes apart, not 5"):
        check_captures([capture], CaptureSetting(model=model, classes=5))
    with pytest.raises(FedveilError, match=r"1.weight|0.weight is torch.float32 in the update and torch.float64"):
        check_captures([capture], CaptureSetting(model=model.double()))


@pytest.mark.parametrize("name", ["mlp:hidden=[3]", "lenet", "lenet5", "cnn", "convnet", "resnet18"])
def test_every_model_can_be_checked(name: str) -> None:
    row = {key: tensor.detach() for key, tensor in models.parse(name).build((1, 32, 32), 10).named_parameters()}
    facts = {"model": name, "shape": [1, 32, 32], "classes": 10}
    assert check_captures([captured(facts, before=row, shared=row)], CaptureSetting()).classes == 10


def test_local_steps_are_repeated_where_they_are_alike() -> None:
    assert steps_alike(local((2,)))
    assert steps_alike(local((4, 4, 2)))
    assert steps_alike(local((4, 2, 4, 2), local_epochs=2))
    for capture in (local((2, 4)), local((4, 2, 4)), local((4, 2, 4, 2)), local((4, 2, 4, 1), local_epochs=2)):
        assert not steps_alike(capture)
        with pytest.raises(FedveilError, match="differ in size or rate"):
            check_captures([capture], CaptureSetting())
        check_captures([capture], CaptureSetting(unroll=False))
    with pytest.raises(FedveilError, match="is not finite: the learning rates"):
        check_captures([captured(kind="delta", lr=(1e-300,))], CaptureSetting())


@pytest.mark.parametrize(
    "labels, line",
    [
        (torch.zeros(1, 3, dtype=torch.int64), r"of shape \(1, 2\), one per example"),
        (torch.zeros(1, 2), "not torch.float32"),
        (torch.tensor([[0, 3]]), "between 0 and 2"),
        (torch.tensor([[-1, 0]]), "between 0 and 2"),
    ],
)
def test_labels_must_fit(labels: torch.Tensor, line: str) -> None:
    check_captures([captured()], CaptureSetting(), torch.tensor([[0, 2]]))
    with pytest.raises(FedveilError, match=line):
        attack_captures([captured()], fv.attacks.InvertingGradients(steps=1), labels=labels)


def test_captures_attacked_together_must_agree() -> None:
    with pytest.raises(FedveilError, match="must agree in batch_sizes"):
        check_captures([captured(), captured(batch_sizes=(3,))], CaptureSetting())
    with pytest.raises(FedveilError, match=r"must agree in mean: \[0.5\] and \[0.4\]"):
        check_captures([captured(), captured({"mean": [0.4]})], CaptureSetting())


def test_a_kept_attack_is_taken_only_as_it_was_written(tmp_path: Path) -> None:
    path, runs = tmp_path / "attacks" / "one", []

    def attack() -> Found:
        runs.append(1)
        return {
            "naive": Reconstruction(torch.rand(2, 1, 4), torch.zeros(2, 1), torch.rand(2), [0], *STEPS, seconds=1.0)
        }

    first = kept(path, lambda: "a", True, attack)
    again = kept(path, lambda: "a", True, attack)
    assert len(runs) == 1
    assert torch.equal(first["naive"].inputs, again["naive"].inputs)
    assert again["naive"].inputs.data_ptr() % 64 == again["naive"].costs.data_ptr() % 64 == 0  # as torch's own tensors
    content = path.read_bytes()
    for place in (8, 60, 200, len(content) // 2, len(content) - 1):  # anywhere in the header and in the values
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        kept(path, lambda: "a", True, attack)
    assert len(runs) == 6
    kept(path, lambda: "b", True, attack)
    assert len(runs) == 7
