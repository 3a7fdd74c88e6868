"""The probe: many victims of one model, sharing what they would share in training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedveil.clients.engine import Engine
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.plan import Plan
from fedveil.federation.prepare import prepare
from fedveil.federation.probe import Probe, Victims, probe
from fedveil.federation.run import federate, train
from fedveil.federation.schedule import epoch_orders
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Prepared
from fedveil.fields import CountOrZero, declared
from fedveil.streams import Streams
from fedveil.tasks.task import Task

from .small import FirstExamples, Shift, assert_rows_close, assert_rows_equal, small_task

FEDSGD = FederationSettings(rounds=1, batch_size=5, momentum=0.5, weight_decay=0.1, record_rounds=(1,))
FEDAVG = FederationSettings(protocol="fedavg", rounds=1, batch_size=5, local_epochs=2, momentum=0.5, record_rounds=(1,))


def prepared(
    task: Task, defense: object, settings: FederationSettings, seed: int = 0, chunk: int | None = None
) -> Prepared:
    engine = Engine(task.model, task.loss, chunk=chunk)
    return prepare(Plan(task, Chain.of(defense), settings, seed), engine=engine)  # type: ignore[arg-type]


def probed(at: Prepared, victims: Victims, number: int = 1, view: int = 0) -> Probe:
    """A probe of the untrained model."""
    params = {n: p.detach() for n, p in at.plan.task.model.named_parameters()}
    buffers = {n: b.detach() for n, b in at.plan.task.model.named_buffers()}
    return probe(at, params, buffers, number, victims, view=view)


@pytest.mark.parametrize("defense", [None, "gradient-dropout", Shift(), FirstExamples(), "gaussian-noise:at=upload"])
@pytest.mark.parametrize("chunk", [1, 2, 32])
def test_equals_what_training_shares_in_its_first_step(defense: object, chunk: int) -> None:
    task = small_task(sizes=(13, 8, 19))
    trained = federate(task, defense, FEDSGD, backend="stacked", seed=3)  # type: ignore[arg-type]
    found = probed(prepared(task, defense, FEDSGD, 3, chunk), Victims(3, 5))
    plain = federate(task, None, FEDSGD, backend="stacked", seed=3)
    for victim, captured in enumerate(trained.captured):
        assert captured.client == victim
        assert_rows_close(found.defended.message.row(victim), captured.capture.shared)
        assert_rows_equal(found.defended.before.row(victim), captured.capture.before)
        assert_rows_equal(found.defended.buffers.row(victim), captured.capture.buffers_before)  # type: ignore[arg-type]
        for mine, theirs in ((found.truth.inputs, captured.truth.inputs), (found.truth.seen, captured.truth.seen)):
            torch.testing.assert_close(mine[victim], theirs)  # type: ignore[index]
        assert torch.equal(found.truth.targets[victim], captured.truth.targets)
        if not isinstance(defense, FirstExamples):
            assert_rows_close(found.undefended.message.row(victim), plain.captured[victim].capture.shared)
    for side in (found.defended, found.undefended):
        assert (side.kind, side.count, side.lr, side.batch_sizes) == ("gradient", 3, (0.1,), (5,))
        assert (side.momentum, side.weight_decay) == (0, 0)  # under FedSGD these are the server's


@pytest.mark.parametrize("upload", ["weights", "delta"])
@pytest.mark.parametrize("defense", [None, "gradient-dropout", Shift(), "gaussian-noise:at=upload"])
def test_equals_what_training_uploads(defense: object, upload: str) -> None:
    """A victim that holds all of its client's data uploads what the client does."""
    task = small_task(norm=False, sizes=(12, 12, 12))
    settings = replace(FEDAVG, upload=upload, weight_decay=0.01)  # type: ignore[arg-type]
    trained = federate(task, defense, settings, backend="stacked", seed=3)  # type: ignore[arg-type]
    found = probed(prepared(task, defense, settings, 3), Victims(3, 12))
    for victim, captured in enumerate(trained.captured):
        assert_rows_close(found.defended.message.row(victim), captured.capture.shared)
        torch.testing.assert_close(found.truth.seen[victim], captured.truth.seen[:12])  # type: ignore[index]
    sent = found.defended
    assert (sent.kind, sent.momentum, sent.weight_decay, sent.local_epochs) == (upload, 0.5, 0.01, 2)
    assert sent.batch_sizes == (5, 5, 2, 5, 5, 2)
    assert sent.examples == 12
    assert found.truth.targets.shape == (3, 12)
    assert sent.gradient["0.weight"].abs().max() < 5


def test_pseudo_gradient_of_one_step_is_the_gradient() -> None:
    task = small_task(norm=False)
    gradients = probed(prepared(task, None, FEDSGD), Victims(3, 3)).defended.gradient
    uploads = probed(prepared(task, None, replace(FEDAVG, local_epochs=1)), Victims(3, 3))
    torch.testing.assert_close(dict(uploads.defended.gradient), dict(gradients), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(uploads.undefended.gradient), dict(gradients), rtol=1e-4, atol=1e-5)


def test_victims_go_through_the_clients_batches() -> None:
    task = small_task(norm=False, sizes=(13, 9))
    truth = probed(prepared(task, Shift(), FEDSGD), Victims(4, 4), number=2).truth
    for victim, client, start in ((0, 0, 0), (1, 1, 0), (2, 0, 4), (3, 1, 4)):
        order = task.clients[client][epoch_orders(0, client, 2, (13, 9)[client])[0]]
        torch.testing.assert_close(truth.inputs[victim], task.train.batch(order[start : start + 4])[0])  # type: ignore[index]
    # The defense counted the step before: its shift has grown.
    shift = (truth.seen - truth.inputs).mean((1, 2))  # type: ignore[operator]
    torch.testing.assert_close(shift, torch.tensor([0.5, 0.5, 1.0, 1.0]), atol=0.15, rtol=0)
    with pytest.raises(FedveilError, match="client 1 has 9 examples, too few for 3 batches of 4"):
        probed(prepared(task, None, FEDSGD), Victims(6, 4))


@declared
class AnyExamples(Defense):
    """Composes every batch of any of the client's examples; of one less than was asked for, if told so."""

    name = "test-any"
    place = "sample"
    fewer: CountOrZero = 0

    def sample(self, labels: Tensor, size: int, streams: Streams) -> Tensor:
        return streams.permutation(len(labels))[:, : size - self.fewer]


def test_a_second_batch_draws_anew() -> None:
    task = small_task(norm=False, sizes=(13,))
    found = probed(prepared(task, "gaussian-noise", FEDSGD), Victims(2, 4))
    noise = found.defended.message - found.undefended.message
    assert not torch.allclose(noise["0.weight"][0], noise["0.weight"][1], rtol=0.1)
    inputs = probed(prepared(task, AnyExamples(), FEDSGD), Victims(2, 4)).truth.inputs
    assert not torch.equal(inputs[0], inputs[1])  # type: ignore[index]
    with pytest.raises(FedveilError, match="batches of unequal sizes"):
        probed(prepared(task, AnyExamples(fewer=1), FEDSGD), Victims(2, 4))


@pytest.mark.parametrize("settings", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
def test_victims_from_the_test_examples(settings: FederationSettings) -> None:
    task = small_task(norm=False)
    at = prepared(task, "gradient-dropout", settings)
    found = probed(at, Victims(6, 4, "test"))
    assert torch.equal(found.truth.targets, task.test.labels.reshape(6, 4))
    torch.testing.assert_close(found.truth.inputs, task.test.batch(range(24))[0].reshape(6, 4, -1))  # type: ignore[union-attr]
    assert found.defended.count == found.undefended.count == 6
    with pytest.raises(FedveilError, match="28 test examples, but there are 24"):
        probed(at, Victims(7, 4, "test"))
    with pytest.raises(FedveilError, match="source 'clients'"):
        probed(prepared(task, FirstExamples(), settings), Victims(3, 5, "test"))


def test_no_defense_in_a_warmup_round() -> None:
    at = prepared(small_task(norm=False), Shift(), replace(FEDSGD, warmup_rounds=1, rounds=2))
    during, after = (probed(at, Victims(3, 3), number) for number in (1, 2))
    assert torch.equal(during.defended.message["0.bias"], during.undefended.message["0.bias"])
    assert not torch.equal(after.defended.message["0.bias"], after.undefended.message["0.bias"])


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_neither_training_nor_another_probe_changes_one(backend: str) -> None:
    task = small_task(norm=False)
    at = prepare(Plan(task, Chain.of("gaussian-noise"), FEDSGD), backend=backend)  # type: ignore[arg-type]
    first = probed(at, Victims(3, 3))
    train(at)
    probed(at, Victims(2, 4))
    again = probed(at, Victims(3, 3))
    assert_rows_equal(dict(first.defended.message), dict(again.defended.message))


@pytest.mark.parametrize("settings", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
def test_where_batches_are_drawn_victims_keep_the_size_that_was_asked_for(settings: FederationSettings) -> None:
    found = probed(prepared(small_task(norm=False), "dp-sgd", settings), Victims(3, 3))
    assert found.truth.targets.shape == (3, 3)
    assert found.defended.examples == 3


def test_a_few_steps_are_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.clients.engine.compile_once", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr("fedveil.clients.engine.packaged", lambda *_, **__: None)
    monkeypatch.setattr("fedveil.clients.engine.compiler_found", lambda: True)
    task = small_task(norm=False)
    engine = Engine(task.model, task.loss, backend="compiled")
    probed(prepare(Plan(task, Chain.of(Shift()), FEDSGD), engine=engine), Victims(2, 3))


@pytest.mark.parametrize(
    ("victims", "number"), [(Victims(3, 5), 0), (Victims(0, 5), 1), (Victims(3, 0), 1)], ids=["round", "count", "size"]
)
def test_nonsense_is_refused(victims: Victims, number: int) -> None:
    with pytest.raises(FedveilError, match="rounds count from 1"):
        probed(prepared(small_task(), None, FEDSGD), victims, number)


# ---- several messages about the same batches -----------------------------------------------------------------


@pytest.mark.parametrize("settings", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
@pytest.mark.parametrize("defense", ["gradient-dropout", "gaussian-noise:at=upload", "fedem:radius=0.5"])
def test_another_view_draws_anew_and_has_the_same_batches(defense: str, settings: FederationSettings) -> None:
    task = small_task(sizes=(13, 8, 19))
    at, victims = prepared(task, defense, settings), Victims(5, 2)
    first, other, again = (probed(at, victims, view=view) for view in (0, 1, 1))
    assert_rows_equal(other.defended.message, again.defended.message)
    assert any(not torch.equal(tensor, other.defended.message[name]) for name, tensor in first.defended.message.items())
    assert_rows_equal(first.undefended.message, other.undefended.message)
    assert torch.equal(first.truth.inputs, other.truth.inputs)  # type: ignore[arg-type]
    assert torch.equal(first.truth.targets, other.truth.targets)


@pytest.mark.parametrize("settings", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
def test_a_defense_that_chooses_the_batch_chooses_it_once(settings: FederationSettings) -> None:
    task = small_task(sizes=(13, 8, 19))
    at = prepared(task, [AnyExamples(), Chain.of("gaussian-noise").defenses[0]], settings)
    first, other = (probed(at, Victims(3, 2), view=view) for view in (0, 1))
    assert torch.equal(first.truth.inputs, other.truth.inputs)  # type: ignore[arg-type]
    assert not torch.equal(first.defended.message.flat(), other.defended.message.flat())
