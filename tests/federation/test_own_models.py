"""What stands beside the utility of the server's model: local models, ensembles, and how far inputs were moved."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import fedveil as fv
from fedveil.cli.display import beside_the_model
from fedveil.defenses.fedbarre import FedBARRE
from fedveil.defenses.fedem import FedEM
from fedveil.federation.evaluate import Evaluator
from fedveil.federation.own_models import LOCAL
from fedveil.federation.perturbation import perturbation
from fedveil.federation.plan import Moment, Plan
from fedveil.federation.prepare import prepare
from fedveil.federation.schedule import batches, epoch_orders
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Group
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.task import Task
from fedveil.tree import Tree

from .small import assert_rows_equal, small_task
from .test_labels import task as labelled_task

FEDAVG = FederationSettings(protocol="fedavg", rounds=2, batch_size=64, local_epochs=4, lr=0.5, local_utility=4)
ENSEMBLE = "randomized ensemble"


def accuracy(model: nn.Module, task: Task) -> float:
    inputs, targets = task.test.batch(range(len(task.test)))
    with torch.no_grad():
        return float((model.eval()(inputs).argmax(1) == targets).double().mean())


def trained_alone(task: Task, client: int, settings: FederationSettings) -> float:
    """The accuracy of one client after its first local round, in plain torch; a batch is all of its data."""
    model = copy.deepcopy(task.model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    inputs, targets = task.train.batch(task.clients[client])
    for _ in range(settings.local_epochs):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return accuracy(model, task)


# ---- local models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("upload", ["weights", "delta"])
@pytest.mark.parametrize("defense", [None, "spm"])
def test_local_models_are_judged_before_their_upload_is_protected(
    backend: str, norm: bool, upload: str, defense: str | None
) -> None:
    task = small_task(norm=norm)
    each = [trained_alone(task, client, FEDAVG) for client in range(4)]
    assert len(set(each)) > 1  # or the count of clients would not show
    for count in (1, 3, 4, 9):
        settings = replace(FEDAVG, rounds=1, upload=upload, local_utility=count)  # type: ignore[arg-type]
        done = fv.federate(task, defense, settings, backend=backend)  # type: ignore[arg-type]
        assert done.utility.beside == {LOCAL: pytest.approx(sum(each[:count]) / len(each[:count]))}
        assert done.history[0].utility == done.utility


def test_what_the_server_gets_under_spm_is_another_number() -> None:
    task = fv.task("digits", model="mlp:hidden=[64]", clients=4)
    settings = FederationSettings(protocol="fedavg", rounds=1, batch_size=16, local_epochs=3, local_utility=2)
    done = fv.federate(task, "spm:epsilon=0.3", settings, backend="stacked")
    assert done.utility.test is not None
    assert done.utility.test < 0.3 < 0.6 < done.utility.beside[LOCAL]


@pytest.mark.parametrize("defense", [None, "spm", FedBARRE(models=2)], ids=str)
@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_looking_changes_nothing_and_is_not_done_unasked(defense: object, protocol: str) -> None:
    settings = FederationSettings(protocol=protocol, rounds=2, batch_size=5)  # type: ignore[arg-type]
    task = small_task(sizes=(13, 8, 22))
    looked, plain = (
        fv.federate(task, defense, replace(settings, local_utility=count), backend="stacked")  # type: ignore[arg-type]
        for count in (2, 0)
    )
    assert_rows_equal(looked.params, plain.params)
    assert_rows_equal(looked.buffers, plain.buffers)
    assert not plain.utility.beside
    expected = ({LOCAL} if protocol == "fedavg" else set()) | ({ENSEMBLE} if isinstance(defense, FedBARRE) else set())
    assert set(looked.utility.beside) == expected


@pytest.mark.parametrize("buffers", ["shared", "local"])
def test_a_lone_clients_local_model_is_the_servers(buffers: str) -> None:
    done = fv.federate(small_task(sizes=(12,), buffers=buffers), None, FEDAVG, backend="stacked")
    assert [record.utility.beside[LOCAL] for record in done.history] == [r.utility.test for r in done.history]


# ---- what a defense lets a client keep ------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["best", "mixed"])
def test_the_ensemble_is_told_apart_from_the_servers_model(selection: str) -> None:
    task = fv.task("digits", model="mlp:hidden=[32]", clients=2, limit=400)
    defense = FedBARRE(selection=selection, lr=0.5)  # type: ignore[arg-type]
    settings = FederationSettings(rounds=2, batch_size=16, local_utility=2)
    done = fv.federate(task, defense, settings, backend="loop")
    prepared = prepare(Plan(task, fv.Chain.of(defense), settings), backend="loop")
    expected = []
    for client, own in enumerate(task.clients):
        order = epoch_orders(0, client, 2, len(own))[0]
        data = prepared.read(task.train, [batches(own[order], 16)[0]])
        group = Group([client], Tree.expand(done.params, 1), Tree({}), data)
        batch = prepared.batch(group, Moment(2, "own models"))
        members, losses = defense.train_ensemble(batch.at(0, {}))
        questions, answers = task.test.batch(range(len(task.test)))
        said = [functional_call(task.model, member.params.row(0), (questions,)).argmax(-1) for member in members]
        right = torch.stack([(each == answers).double().mean() for each in said])
        alpha = torch.softmax(-losses[0] / defense.entropy, 0) if selection == "mixed" else losses[0] == losses[0].min()
        expected.append(float((right * alpha).sum()))
    assert done.utility.beside[ENSEMBLE] == pytest.approx(sum(expected) / 2)
    assert done.utility.beside[ENSEMBLE] != done.utility.test
    assert list(beside_the_model(done)) == [
        f"randomized ensemble: test accuracy {50 * sum(expected):.1f} % (not that of the federation's model)"
    ]


@pytest.mark.parametrize("selection", ["best", "mixed"])
def test_an_ensemble_that_did_not_move_is_the_servers_model_also_with_several_labels(selection: str) -> None:
    defense, settings = FedBARRE(selection=selection, lr=0.0), FederationSettings(rounds=2, local_utility=2)  # type: ignore[arg-type]
    for task in (labelled_task(), fv.task("digits", model="mlp", clients=2, limit=200)):
        done = fv.federate(task, defense, settings, backend="loop")
        assert done.utility.beside[ENSEMBLE] == pytest.approx(done.utility.test)


def test_data_defenses_before_an_ensemble_are_at_work_and_warm_up_has_none() -> None:
    task = fv.task("digits", model="mlp:hidden=[16]", clients=2, limit=200)
    settings = FederationSettings(rounds=1, batch_size=16, local_utility=2)
    alone, moved = (
        fv.federate(task, [*before, FedBARRE(lr=2.0)], settings, backend="loop") for before in ([], [FedEM(radius=20)])
    )
    assert alone.utility.beside != moved.utility.beside
    warm = fv.federate(task, FedBARRE(), replace(settings, warmup_rounds=1), backend="loop")
    assert not warm.utility.beside


def test_a_task_without_classes_has_no_utility_beside() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator)
    task = Task(
        nn.Linear(3, 1), (inputs, torch.arange(40) % 3), lambda out, t: (out[:, 0] - t).square().mean(), clients=2
    )
    assert task.classes is None
    done = fv.federate(task, None, FederationSettings(protocol="fedavg", rounds=1, local_utility=2), backend="loop")
    assert not done.utility.beside
    assert Evaluator(task).test_value(done.params, done.buffers) is None


# ---- how far inputs were moved --------------------------------------------------------------------------------


def test_the_size_of_a_perturbation_by_hand() -> None:
    stds, generator = (0.2, 0.5), torch.Generator().manual_seed(0)
    was = torch.randn(5, 2, 3, 3, generator=generator)
    change = 0.1 * torch.randn(5, 2, 3, 3, generator=generator)
    pixels = change.double() * torch.tensor(stds).double().reshape(2, 1, 1)
    pairs = [(was[:2], (was + change)[:2]), (was[2:], (was + change)[2:])]
    found = perturbation(pairs, Normalization((0.3, 0.4), stds))
    assert found is not None
    length, greatest = pixels.flatten(1).norm(dim=1), pixels.abs().flatten(1).amax(1)
    expected = (pixels.abs().mean(), length.mean(), length.max(), greatest.mean(), greatest.max())
    told = (found.mean, found.l2, found.l2_max, found.linf, found.linf_max)
    assert told == pytest.approx([float(value) for value in expected], rel=1e-5)
    assert found.l2_input == pytest.approx(float(change.flatten(1).norm(dim=1).mean()), rel=1e-5)
    assert f"a pixel moves by {255 * found.mean:.2g}/255 in the mean" in str(found)
    bare = perturbation(pairs, None)
    assert bare is not None
    assert (bare.unit, bare.l2) == ("input", found.l2_input)
    assert str(bare).startswith(f"an input moves by {bare.mean:.3g}")


def test_parts_that_were_not_moved_or_cannot_be_compared_have_no_size() -> None:
    words = {"ids": torch.ones(2, 4).long(), "embedded": torch.zeros(2, 4, 3)}
    moved = words | {"embedded": torch.ones(2, 4, 3)}
    assert perturbation([(words, moved)], None, "ids") is None
    assert perturbation([(words, words)], None, "embedded") is None
    assert perturbation([(words, {"ids": words["ids"]})], None, "embedded") is None
    assert perturbation([], None) is None
    found = perturbation([(words, moved)], None, "embedded")
    assert found is not None
    assert found.l2 == pytest.approx(12**0.5)


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_rounds_that_are_captured_note_it_and_no_capture_tells(protocol: str, tmp_path: Path) -> None:
    task = fv.task("digits", model="mlp", clients=2, limit=200)
    settings = FederationSettings(protocol=protocol, rounds=3, batch_size=16, record_rounds=(2, 3), record_clients=1)  # type: ignore[arg-type]
    done = fv.federate(task, FedEM(radius=8 / 255, steps=3), settings, backend="stacked", folder=tmp_path)
    assert task.normalization is not None
    notes = [record.perturbation for record in done.history]
    assert notes[0] is None
    for note in notes[1:]:
        assert note is not None
        assert note.l2_input == pytest.approx(8 / 255, rel=1e-3)  # a sign step overshoots: δ ends at the edge
        assert note.l2 == pytest.approx(8 / 255 * task.normalization.std[0], rel=1e-3)
        assert 0 < note.mean <= note.linf <= note.linf_max <= note.l2_max
    assert list(beside_the_model(done)) == [f"round 3: {notes[2]}"]
    files = list((tmp_path / "captures").iterdir())
    assert len(files) == 2
    assert not any(b"perturbation" in file.read_bytes() or b"l2_input" in file.read_bytes() for file in files)
    assert not any(record.perturbation for record in fv.federate(task, None, settings, backend="stacked").history)
