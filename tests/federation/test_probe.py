"""The probe: many victims of one model, sharing what they would share in training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedveil.clients.engine import Engine
from fedveil.errors import FedveilError
from fedveil.federation.probe import Probe, probe
from fedveil.federation.run import engine_for, federate
from fedveil.federation.schedule import epoch_orders
from fedveil.federation.settings import FederationSettings
from fedveil.tasks.task import Task
from fedveil.tree import Tree

from .small import FirstExamples, Shift, assert_rows_close, small_task

FEDSGD = FederationSettings(rounds=1, batch_size=5, record_rounds=(1,))
FEDAVG = FederationSettings(protocol="fedavg", rounds=1, batch_size=5, local_epochs=2, momentum=0.5, record_rounds=(1,))


def probed(task: Task, defense: object, settings: FederationSettings, **given: object) -> Probe:
    params = {n: p.detach() for n, p in task.model.named_parameters()}
    buffers = {n: b.detach() for n, b in task.model.named_buffers()}
    defaults: dict[str, object] = {"round": 1, "victims": 3, "batch_size": 5, "engine": Engine(task.model, task.loss)}
    return probe(task, defense, settings, params=params, buffers=buffers, **{**defaults, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("defense", [None, "gradient-dropout", Shift(), FirstExamples(), "gaussian-noise:at=upload"])
@pytest.mark.parametrize("chunk", [1, 2, 32])
def test_equals_what_training_shares_in_its_first_step(defense: object, chunk: int) -> None:
    task = small_task(sizes=(13, 8, 19))
    trained = federate(task, defense, FEDSGD, backend="stacked", seed=3)  # type: ignore[arg-type]
    found = probed(task, defense, FEDSGD, seed=3, engine=Engine(task.model, task.loss, chunk=chunk))
    plain = federate(task, None, FEDSGD, backend="stacked", seed=3)
    assert found.clients == (0, 1, 2)
    for victim, captured in enumerate(trained.captured):
        assert_rows_close(found.defended.row(victim), captured.capture.shared)
        assert_rows_close(found.buffers.row(victim), captured.capture.buffers)  # type: ignore[arg-type]
        for mine, theirs in ((found.inputs, captured.truth.inputs), (found.seen, captured.truth.seen)):
            torch.testing.assert_close(mine[victim], theirs)  # type: ignore[index]
        assert torch.equal(found.targets[victim], captured.truth.targets)
        if not isinstance(defense, FirstExamples):
            assert_rows_close(found.undefended.row(victim), plain.captured[victim].capture.shared)
    assert (found.kind, found.steps, found.lr, found.batch_sizes) == ("gradient", 1, (0.1,), (5,))


@pytest.mark.parametrize("upload", ["weights", "delta"])
@pytest.mark.parametrize("defense", [None, "gradient-dropout", Shift(), "gaussian-noise:at=upload"])
def test_equals_what_training_uploads(defense: object, upload: str) -> None:
    """A victim that holds all of its client's data uploads what the client does."""
    task = small_task(norm=False, sizes=(12, 12, 12))
    settings = replace(FEDAVG, upload=upload)  # type: ignore[arg-type]
    trained = federate(task, defense, settings, backend="stacked", seed=3)  # type: ignore[arg-type]
    found = probed(task, defense, settings, seed=3, batch_size=12)
    for victim, captured in enumerate(trained.captured):
        assert_rows_close(found.uploads.row(victim), captured.capture.shared)
        torch.testing.assert_close(found.seen[victim], captured.truth.seen[:12])  # type: ignore[index]
    assert found.kind == upload
    assert found.batch_sizes == (5, 5, 2, 5, 5, 2)
    assert found.targets.shape == (3, 12)
    assert found.defended["0.weight"].abs().max() < 5


def test_pseudo_gradient_of_one_step_is_the_gradient() -> None:
    task = small_task(norm=False)
    gradients = probed(task, None, FEDSGD, batch_size=3)
    uploads = probed(task, None, replace(FEDAVG, local_epochs=1), batch_size=3)
    torch.testing.assert_close(dict(uploads.defended), dict(gradients.defended), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(uploads.undefended), dict(gradients.defended), rtol=1e-4, atol=1e-5)


def test_victims_go_through_the_clients_batches() -> None:
    task = small_task(norm=False, sizes=(13, 9))
    found = probed(task, Shift(), FEDSGD, victims=4, batch_size=4, round=2)
    assert found.clients == (0, 1, 0, 1)
    order = task.clients[1][epoch_orders(0, 1, 2, 9)[0]]
    torch.testing.assert_close(found.inputs[3], task.train.batch(order[4:8])[0])  # type: ignore[index]
    # The defense counted the step before: its shift has grown.
    shift = (found.seen - found.inputs).mean((1, 2))  # type: ignore[operator]
    torch.testing.assert_close(shift, torch.tensor([0.5, 0.5, 1.0, 1.0]), atol=0.15, rtol=0)
    with pytest.raises(FedveilError, match="client 1 has 9 examples, too few for 3 batches of 4"):
        probed(task, None, FEDSGD, victims=6, batch_size=4)


@pytest.mark.parametrize("settings", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
def test_victims_from_the_test_examples(settings: FederationSettings) -> None:
    task = small_task(norm=False)
    found = probed(task, "gradient-dropout", settings, victims=6, batch_size=4, source="test")
    assert torch.equal(found.targets, task.test.labels.reshape(6, 4))
    torch.testing.assert_close(found.inputs, task.test.batch(range(24))[0].reshape(6, 4, -1))  # type: ignore[union-attr]
    assert isinstance(found.undefended, Tree)
    assert found.defended.count == 6
    with pytest.raises(FedveilError, match="28 test examples, but there are 24"):
        probed(task, None, settings, victims=7, batch_size=4, source="test")
    with pytest.raises(FedveilError, match="source 'clients'"):
        probed(task, FirstExamples(), settings, source="test")


def test_no_defense_in_a_warmup_round() -> None:
    task = small_task(norm=False)
    settings = replace(FEDSGD, warmup_rounds=1, rounds=2)
    during, after = (probed(task, Shift(), settings, round=number, batch_size=3) for number in (1, 2))
    assert torch.equal(during.defended["0.bias"], during.undefended["0.bias"])
    assert not torch.equal(after.defended["0.bias"], after.undefended["0.bias"])


def test_an_engine_as_a_run_would_use_it() -> None:
    task = small_task()
    task.model.eval()
    engine = engine_for(task, FEDSGD, backend="stacked")
    assert engine.model.training
    assert engine.chunk == 4


def test_nonsense_is_refused() -> None:
    with pytest.raises(FedveilError, match="rounds count from 1"):
        probed(small_task(), None, FEDSGD, round=0)
