"""A task over Flower computes what the embedded engine computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedveil as fv
from fedveil.defenses.base import Defense
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, Truth
from fedveil.federation.plan import Moment
from fedveil.federation.steps import Group
from fedveil.flower.task_client import Site, app
from fedveil.flower.task_server import federate
from fedveil.flower.task_settings import KEY, SEEDED_NOISE, TRUTHS, TaskRun
from fedveil.registry import defenses
from fedveil.tree import Tree
from flower.exchange import context
from flower.grids import FakeGrid

TASK = {"data": "digits", "model": "mlp:hidden=[12]", "clients": 3, "limit": 150}
FEDAVG = {"protocol": "fedavg", "rounds": 1, "batch_size": 16, "lr": 0.1, "local_epochs": 1}


def run_of(tmp_path: Path, defense: str, federation: dict[str, Any], **more: Any) -> TaskRun:
    return TaskRun(task=TASK, federation=federation, defense=defense, seed=5, noise="seeded", out=tmp_path, **more)


def over_flower(run: TaskRun) -> Any:
    run.check()
    apps = dict.fromkeys(range(run.task.clients), app)
    return federate(run, FakeGrid(apps, {KEY: run.told(), "defense": run.defense}))


def embedded(run: TaskRun) -> Any:
    return fv.federate(run.build(), run.chain, run.federation, seed=run.seed, backend="loop")


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEEDED_NOISE, "1")


def uploads() -> list[str]:
    """Every registered defense of an update, in a form that acts on the upload."""
    found = []
    for name in defenses.entries():
        cls = type(defenses.parse(name))
        if "at" in getattr(cls, "__dataclass_fields__", {}):
            found.append(f"{name}:at=upload")
        elif cls.place == "upload":
            found.append(name)
    return found


def kinds(defense: str) -> list[str]:
    of = fv.Chain.of(defense).defenses[0].of
    return [kind for kind in ("weights", "delta") if kind in of]


@pytest.mark.parametrize("defense, kind", [(each, kind) for each in uploads() for kind in kinds(each)])
def test_fedavg_comes_to_the_same_weights_under_every_defense_of_the_upload(
    tmp_path: Path, defense: str, kind: str
) -> None:
    run = run_of(tmp_path, defense, {**FEDAVG, "upload": kind})
    ours, theirs = over_flower(run).arrays, embedded(run).params
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-5, atol=1e-5 * max(1.0, tensor.abs().max().item())), name


@pytest.mark.parametrize("defense", ["none", "fedem", "gradient-dropout", "dp-sgd", "soteria+spm:epsilon=2"])
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_so_it_does_under_defenses_in_training(tmp_path: Path, defense: str, weighting: str) -> None:
    run = run_of(tmp_path, defense, {**FEDAVG, "rounds": 2, "weighting": weighting, "momentum": 0.5})
    ours, theirs = over_flower(run).arrays, embedded(run).params
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-4, atol=1e-5), name


def data_defenses() -> list[str]:
    return [name for name in defenses.entries() if type(defenses.parse(name)).place == "data"]


DOUBLE = """
from torch.nn import Flatten, Linear, Sequential, Tanh

def model():
    return Sequential(Flatten(), Linear(64, 12), Tanh(), Linear(12, 10)).double()
"""


@pytest.mark.parametrize("protocol", ["fedavg", "fedsgd"])
@pytest.mark.parametrize("defense", data_defenses())
def test_data_defenses_in_double_precision_come_to_the_same_weights(
    tmp_path: Path, defense: str, protocol: str
) -> None:
    """Their sign steps make of the last bit of a gradient a whole step: in single precision that says nothing."""
    (tmp_path / "own.py").write_text(DOUBLE)
    # A round of FedSGD is an epoch in the engine and a message over Flower: one batch is both.
    run = run_of(tmp_path, defense, {**FEDAVG, "protocol": protocol, "batch_size": 64 if protocol == "fedsgd" else 16})
    run = run.model_copy(update={"task": run.task.model_copy(update={"model": f"{tmp_path / 'own.py'}:model"})})
    ours, theirs = over_flower(run).arrays, embedded(run).params
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype == torch.float64
        assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-12), name


def test_data_defenses_change_what_is_learned(tmp_path: Path) -> None:
    plain, *others = (over_flower(run_of(tmp_path / each, each, FEDAVG)).arrays for each in ("none", *data_defenses()))
    assert len(others) >= 3
    assert not any(torch.allclose(plain["1.weight"], other["1.weight"], atol=1e-5) for other in others)


def test_fedsgd_with_one_batch_per_message_is_the_engine_s(tmp_path: Path) -> None:
    sgd = {"protocol": "fedsgd", "batch_size": 16, "lr": 0.2, "momentum": 0.5}
    steps = -(-len(run_of(tmp_path, "none", {**sgd, "rounds": 1}).build().clients[0]) // 16)
    run = run_of(tmp_path / "a", "gradient-dropout+spm:epsilon=5", {**sgd, "rounds": 2 * steps})
    ours = over_flower(run).arrays
    theirs = embedded(run.model_copy(update={"federation": fv.FederationSettings(**sgd, rounds=2)})).params
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-4, atol=1e-5), name


def test_several_batches_in_one_message_are_the_mean_of_their_gradients(tmp_path: Path) -> None:
    sgd = {"protocol": "fedsgd", "batch_size": 10, "lr": 0.2, "rounds": 1}
    several = over_flower(run_of(tmp_path / "a", "none", sgd, flower={"batches_per_message": 2})).arrays
    whole = over_flower(run_of(tmp_path / "b", "none", {**sgd, "batch_size": 20})).arrays
    for name, tensor in whole.items():
        assert torch.allclose(several[name], tensor, atol=1e-6), name


def test_captures_of_a_simulation_have_their_truth_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "truths").mkdir()
    monkeypatch.setenv(TRUTHS, str(tmp_path / "truths"))
    run = run_of(tmp_path, "spm:epsilon=4", {**FEDAVG, "record_rounds": [1], "record_clients": 1})
    over_flower(run)
    name = "round-0001-client-0000.safetensors"
    seen, truth = Capture.load(tmp_path / "captures" / name), Truth.load(tmp_path / "truths" / name)
    seen.check(run.build().model)
    assert sum(seen.batch_sizes) == len(truth.targets)
    assert seen.public.defense == "spm:epsilon=4"
    theirs = embedded(run).captured[0]
    assert all(torch.allclose(seen.shared[name], t, atol=1e-5) for name, t in theirs.capture.shared.items())
    assert torch.equal(truth.inputs, theirs.truth.inputs)


def test_noise_from_a_seed_is_refused_by_a_client_that_does_not_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SEEDED_NOISE)
    outcome = over_flower(run_of(tmp_path, "spm", FEDAVG, flower={"minimum": 1}))
    assert "which its server could remove" in outcome.history[0].failed[0]


def test_secure_noise_differs_from_run_to_run(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path / name, "gaussian-noise:sigma=0.1,at=upload", FEDAVG).model_copy(update={"noise": "secure"})
        for name in "ab"
    ]
    first, second = (over_flower(run).arrays for run in runs)
    assert not any(torch.isclose(first[name], second[name]).all() for name in first)


def test_the_outcome_and_the_model_are_written(tmp_path: Path) -> None:
    over_flower(run_of(tmp_path, "dp-gaussian:epsilon=1,at=upload", {**FEDAVG, "upload": "delta"}))
    told = json.loads((tmp_path / "outcome.json").read_text())
    assert told["rounds"] == 1
    assert 0 < told["evaluation"]["test accuracy"] < 1
    assert told["guarantee"]["epsilon"] == pytest.approx(1, rel=0.05)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    "federation, task, defense, why",
    [
        ({**FEDAVG, "warmup_rounds": 1}, TASK, "none", "warm-up"),
        (FEDAVG, {**TASK, "buffers": "local"}, "none", "shared or recalibrated"),
        (FEDAVG, TASK, "cdp", "trusted server"),
        (FEDAVG, TASK, "dp-gaussian:at=upload", "use upload='delta'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, federation: dict[str, Any], task: dict[str, Any], defense: str, why: str
) -> None:
    with pytest.raises(FedveilError, match=why):
        TaskRun(task=task, federation=federation, defense=defense, out=tmp_path).check()


def test_all_defenses_of_an_update_are_among_those_compared() -> None:
    names = {each.partition(":")[0] for each in uploads()}
    assert {"spm", "gradient-dropout", "dp-gaussian", "ldp-fl", "pm"} <= names
    assert all(issubclass(type(defenses.parse(name)), Defense) for name in names)


def test_secure_noise_is_the_operating_system_s_and_not_that_of_a_drawn_seed(tmp_path: Path) -> None:
    for noise in ("secure", "seeded"):
        run = run_of(tmp_path, "spm", FEDAVG).model_copy(update={"noise": noise})
        site = Site(context({KEY: run.told()}))
        task = site.plan.task
        data = site.prepared.read(task.train, [task.clients[0][:2]])
        weights = {name: p.detach() for name, p in task.model.named_parameters()}
        group = Group([0], Tree.expand(weights, 1), Tree({}), data)
        assert noise in repr(site.prepared.batch(group, Moment(1, "upload")).streams)
