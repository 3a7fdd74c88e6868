"""The rounds against a plain implementation, and what must not change them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.clients.engine import Engine
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.defenses.dp_sgd import DPSGD
from fedveil.errors import FedveilError
from fedveil.federation import fedavg, fedsgd
from fedveil.federation.client_memory import ClientMemory
from fedveil.federation.exposure import exposures
from fedveil.federation.local import Chunk, train_chunk
from fedveil.federation.plan import Moment, Plan
from fedveil.federation.run import Run, federate
from fedveil.federation.schedule import batches, epoch_orders, sampled_clients
from fedveil.federation.server import Server
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Group, Prepared
from fedveil.streams import Streams
from fedveil.tasks.examples import ArrayExamples
from fedveil.tasks.task import Task
from fedveil.tree import Tree

from .reference import reference
from .small import (
    Broken,
    Central,
    Feedback,
    FirstExamples,
    Noted,
    Shift,
    Validated,
    assert_rows_close,
    assert_rows_equal,
    small_task,
)

FEDSGD = FederationSettings(rounds=3, batch_size=4)
FEDAVG = FederationSettings(protocol="fedavg", rounds=3, batch_size=4, local_epochs=2)


def run(
    task: Task, settings: FederationSettings, defense: object = None, backend: str = "stacked", **given: object
) -> Run:
    return federate(task, defense, settings, backend=backend, **given)  # type: ignore[arg-type]


def run_rounds(prepared: Prepared, *rounds: list[int]) -> tuple[Server, ClientMemory]:
    """Some rounds of the given clients."""
    server, memory = Server.start(prepared), ClientMemory()
    act = fedsgd.fedsgd_round if prepared.plan.settings.protocol == "fedsgd" else fedavg.fedavg_round
    for number, clients in enumerate(rounds, 1):
        act(prepared, server, memory, number, clients)
    return server, memory


def run_chunked(
    task: Task, settings: FederationSettings, chunk: int, backend: str, defense: object
) -> tuple[Server, ClientMemory]:
    engine = Engine(task.model, task.loss, backend=backend, chunk=chunk)  # type: ignore[arg-type]
    everyone = list(range(len(task.clients)))
    return run_rounds(Prepared(Plan(task, Chain.of(defense), settings), engine), everyone, everyone)  # type: ignore[arg-type]


VARIANTS = [
    {},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"weighting": "size"},
    {"sampling_rate": 0.5, "momentum": 0.5},
    {"lr_steps": ((2, 0.02), (3, 0.5)), "momentum": 0.5},
]


@pytest.mark.parametrize("protocol", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("sizes", [(13, 8, 2, 19), (9,) * 3], ids=["unequal", "equal"])
def test_equals_plain_torch(
    protocol: FederationSettings, backend: str, variant: dict[str, object], sizes: tuple[int, ...]
) -> None:
    # Batch norm cannot train on a batch of one: 13 and 9 leave one in batches of 4, so take 5 and 6.
    settings = replace(protocol, batch_size=5 if len(sizes) == 4 else 6, **variant)  # type: ignore[arg-type]
    # In single precision, batch norm over two examples amplifies rounding to about 1e-5.
    task = small_task(sizes=sizes, dtype=torch.float64)
    done = run(task, settings, backend=backend)
    params, buffers = reference(task, settings)
    assert_rows_close(done.params, params, 1e-10)
    assert_rows_close(done.buffers, buffers, 1e-10)


@pytest.mark.parametrize("protocol", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
def test_equals_plain_torch_in_single_precision(protocol: FederationSettings) -> None:
    settings = replace(protocol, momentum=0.9, weight_decay=0.01)
    task = small_task(norm=False)
    assert_rows_close(run(task, settings).params, reference(task, settings)[0])


def test_delta_uploads_equal_weight_uploads() -> None:
    task = small_task(norm=False)
    assert_rows_close(run(task, FEDAVG).params, run(task, replace(FEDAVG, upload="delta")).params)


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_one_client_with_its_whole_data_is_plain_sgd(protocol: str) -> None:
    task = small_task(norm=False, sizes=(12,))
    settings = FederationSettings(protocol=protocol, rounds=1, batch_size=12, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]
    done = run(task, settings)
    inputs, targets = task.train.batch(range(12))
    params, _ = reference(task, settings)
    before = task.loss(task.model(inputs), targets).item()
    assert done.history[0].train_loss == pytest.approx(before, rel=1e-5)
    assert_rows_close(done.params, params, 1e-6)


@pytest.mark.parametrize("protocol", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
@pytest.mark.parametrize("defense", [None, Shift(), "gradient-dropout", "gaussian-noise:at=upload"], ids=str)
def test_chunks_and_backends_do_not_matter(protocol: FederationSettings, defense: object) -> None:
    task = small_task(norm=False)
    whole, _ = run_chunked(task, protocol, 32, "stacked", defense)
    for chunk, backend in ((1, "stacked"), (3, "stacked"), (32, "loop"), (2, "loop")):
        other, _ = run_chunked(task, protocol, chunk, backend, defense)
        assert_rows_close(other.params, whole.params)


@pytest.mark.parametrize("protocol", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
def test_same_seed_same_bits_other_seed_others(protocol: FederationSettings) -> None:
    task = small_task(norm=False)
    first, again = (run(task, protocol, "gradient-dropout", seed=5) for _ in range(2))
    assert_rows_equal(first.params, again.params)
    other = run(task, protocol, "gradient-dropout", seed=6)
    assert not torch.equal(first.params["0.weight"], other.params["0.weight"])


def test_the_tasks_model_is_left_alone() -> None:
    task = small_task(sizes=(8, 12))
    before = task.model_hash
    task.model.eval()
    run(task, FEDSGD)
    assert task.model_hash == before
    assert not task.model.training


# ---- who takes part, and in which order --------------------------------------------------------------------


@pytest.mark.parametrize("count, rate, expected", [(10, 0.1, 1), (30, 0.1, 3), (10, 0.01, 1), (7, 0.5, 4), (4, 1.0, 4)])
def test_sampling_takes_the_rounded_up_share(count: int, rate: float, expected: int) -> None:
    rounds = [sampled_clients(0, count, rate, number) for number in range(1, 120)]
    assert all(len(clients) == expected and clients == sorted(set(clients)) for clients in rounds)
    assert {client for clients in rounds for client in clients} == set(range(count))


def test_orders_are_the_clients_own() -> None:
    mine = epoch_orders(0, 3, 1, 20, 2)
    assert torch.equal(mine[0], epoch_orders(0, 3, 1, 20)[0])
    for other in (mine[1], epoch_orders(0, 4, 1, 20)[0], epoch_orders(0, 3, 2, 20)[0], epoch_orders(1, 3, 1, 20)[0]):
        assert not torch.equal(mine[0], other)
        assert torch.equal(other.sort().values, torch.arange(20))
    assert [len(batch) for batch in batches(mine[0], 8)] == [8, 8, 4]


def test_a_client_out_of_batches_leaves_the_mean() -> None:
    """Client 1 has one batch, client 0 two: the second step is client 0's alone."""
    task = small_task(norm=False, sizes=(8, 4))
    settings = FederationSettings(rounds=1, batch_size=4, lr=0.1, record_rounds=(1,))
    done = run(task, settings)
    first = {c.capture.client: c.capture.shared for c in done.captured}
    middle = {n: w - 0.1 * (first[0][n] + first[1][n]) / 2 for n, w in done.captured[0].capture.before.items()}
    own = task.clients[0][epoch_orders(0, 0, 1, 8)[0]]
    inputs, targets = task.train.batch(own[4:])
    live = {name: weight.clone().requires_grad_() for name, weight in middle.items()}
    task.loss(torch.func.functional_call(task.model, live, (inputs,)), targets).backward()
    assert_rows_close(done.params, {n: w.detach() - 0.1 * w.grad for n, w in live.items()})  # type: ignore[operator]


# ---- defenses over rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
def test_warmup_rounds_have_no_defense(protocol: FederationSettings) -> None:
    task = small_task(norm=False)
    defended = run(task, replace(protocol, warmup_rounds=2, record_rounds=(2, 3), record_clients=1), Shift())
    plain = run(task, replace(protocol, rounds=2))
    assert defended.captured[0].capture.facts["defense"] == "none"
    assert defended.captured[1].capture.facts["defense"] == "test-shift"
    assert_rows_equal(defended.captured[1].capture.before, plain.params)
    assert not torch.equal(defended.params["0.weight"], run(task, protocol).params["0.weight"])


def test_round_memory_is_cleared_and_run_memory_stays() -> None:
    task = small_task(norm=False)
    chain = Chain((Shift(), Feedback()))
    prepared = Prepared(Plan(task, chain, FEDSGD), Engine(task.model, task.loss))
    server, memory = run_rounds(prepared, [0, 2])
    kept = memory.states.lasting(chain)
    assert kept.keys() == {0, 2}
    assert not kept[0][0]
    assert kept[0][1].keys() == server.params.keys()
    fedsgd.fedsgd_round(prepared, server, memory, 2, [0, 1])  # client 1 has no memory yet: it is stepped apart
    assert memory.states.lasting(chain).keys() == {0, 1, 2}
    torch.testing.assert_close(memory.states.lasting(chain)[2][1]["0.bias"], kept[2][1]["0.bias"])


@pytest.mark.parametrize("upload", ["weights", "delta"])
def test_a_trusted_server_sees_all_updates(upload: str) -> None:
    task = small_task(norm=False)
    start = {n: p.detach() for n, p in task.model.named_parameters()}
    settings = replace(FEDAVG, rounds=1, upload=upload)  # type: ignore[arg-type]
    plain, halved = run(task, settings).params, run(task, settings, Central(factor=0.5)).params
    assert_rows_close(halved, {n: (w + plain[n]) / 2 for n, w in start.items()})
    faster = run(task, replace(FEDSGD, rounds=1, lr=0.2), Central(factor=0.5))
    assert_rows_close(faster.params, run(task, replace(FEDSGD, rounds=1)).params)


def test_defenses_of_the_upload_see_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_task(norm=False, sizes=(13, 8))
    shown: dict[int, Tensor] = {}
    batch = Prepared.batch

    def watched(self: Prepared, group: Group, moment: Moment) -> ClientBatch:
        if moment == Moment(2, "upload"):
            shown.update(zip(group.clients, group.data[0], strict=True))  # type: ignore[arg-type]
        return batch(self, group, moment)

    monkeypatch.setattr(Prepared, "batch", watched)
    run(task, replace(FEDAVG, rounds=2), "gaussian-noise:at=upload")
    for client, size in ((0, 1), (1, 4)):  # 13 examples in batches of 4 leave one
        own = task.clients[client]
        last = own[epoch_orders(0, client, 2, len(own), epochs=2)[1]][-size:]
        torch.testing.assert_close(shown[client], task.train.batch(last)[0])


def test_a_sampling_defense_composes_the_batches() -> None:
    task = small_task(norm=False)
    done = run(task, replace(FEDSGD, rounds=1, record_rounds=(1,)), FirstExamples())
    for captured in done.captured:
        labels = task.train.labels[task.clients[captured.capture.client]]
        assert torch.equal(captured.truth.targets, labels.sort().values[: len(captured.truth.targets)])


def test_a_defense_gets_validation_data_of_the_clients_own() -> None:
    task = small_task(norm=False)
    done = run(task, replace(FEDSGD, rounds=1, record_rounds=(1,)), Validated())
    for captured in done.captured:
        # 30 examples dealt out to 4 clients in turn, 7 each.
        inputs, targets = task.validation.batch(range(captured.capture.client, 28, 4))  # type: ignore[union-attr]
        shift = captured.truth.seen - captured.truth.inputs  # type: ignore[operator]
        torch.testing.assert_close(shift, task.loss(task.model(inputs), targets).detach().expand_as(shift))
    bare = Task(task.model, (task.train.batch(range(45)), task.test.batch(range(24))), clients=2)
    with pytest.raises(FedveilError, match="needs validation data of each client's own"):
        run(bare, FEDSGD, Validated())


@pytest.mark.parametrize("protocol, where", [(FEDSGD, "step 0"), (FEDAVG, "step 0")])
def test_a_broken_update_names_its_client(protocol: FederationSettings, where: str) -> None:
    with pytest.raises(FedveilError, match=f"client 0 is not finite .* in round 1, {where}"):
        run(small_task(norm=False), protocol, Broken())


def poisoned(task: Task, client: int) -> Task:
    """The same task, in which one client's last example is not a number, as a sensor may break later on."""
    part = task.train
    assert isinstance(part, ArrayExamples)
    assert isinstance(part._inputs, Tensor)
    part._inputs[part._rows[task.clients[client][-1]]] = float("nan")
    return task


REFUSING = [replace(FEDSGD, weighting="size", momentum=0.5), replace(FEDAVG, weighting="size", momentum=0.5)]


@pytest.mark.parametrize("settings", REFUSING, ids=["fedsgd", "fedavg"])
@pytest.mark.parametrize("buffers", ["shared", "local"])
@pytest.mark.parametrize("other", ["stacked", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_broken_client_costs_its_share_and_no_more(settings: FederationSettings, buffers: str, other: str) -> None:
    task = poisoned(small_task(sizes=(8, 8, 8), buffers=buffers), 1)
    runs = {backend: run(task, settings, Feedback(), backend=backend) for backend in ("loop", other)}
    for each in runs.values():
        assert_rows_close(each.params, runs["loop"].params)
        assert_rows_close(each.buffers, runs["loop"].buffers)
        for record in each.history:
            assert list(record.refused) == [1]
            assert "the update of client 1 is not finite (NaN or infinity)" in record.refused[1]
            assert math.isfinite(record.train_loss)
    done = runs["loop"]
    assert all(bool(tensor.isfinite().all()) for tensor in {**done.params, **done.buffers}.values())
    if settings.protocol == "fedavg":  # the whole of its round is lost: the others train as if it were not there
        plan = Plan(task, Chain.of(Feedback()), settings)
        server, _ = run_rounds(Prepared(plan, Engine(task.model, task.loss, backend="loop")), *[[0, 2]] * 3)
        assert_rows_equal(done.params, server.params)


@pytest.mark.parametrize("settings", REFUSING, ids=["fedsgd", "fedavg"])
def test_chunks_do_not_matter_to_who_is_refused(settings: FederationSettings) -> None:
    task = poisoned(small_task(norm=False), 3)
    one, many = (run_chunked(task, settings, chunk, "loop", Feedback()) for chunk in (1, 32))
    assert_rows_close(one[0].params, many[0].params)
    (memory,) = one[1].states.lasting(Chain.of(Feedback()))[3]
    assert all(bool(tensor.isfinite().all()) for tensor in memory.values())


def test_a_refused_clients_local_model_is_not_judged() -> None:
    task = poisoned(small_task(norm=False, sizes=(8, 8)), 1)
    prepared = Prepared(Plan(task, Chain(), FEDAVG), Engine(task.model, task.loss))
    chunk = Chunk([0, 1], 1, Server.start(prepared).params, Tree({}), ClientStates(), judge=frozenset((0, 1)))
    assert train_chunk(prepared, chunk).tally.trained.keys() == {0}


def test_a_refused_client_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    run(poisoned(small_task(sizes=(8, 8)), 1), replace(FEDAVG, rounds=1))
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "the update of client 1 is not finite" in line
    assert "in round 1" in line


def test_a_step_without_an_update_changes_nothing() -> None:
    task = poisoned(small_task(norm=False, sizes=(8,)), 0)  # one client: of two steps one is lost
    settings = FederationSettings(rounds=1, batch_size=4, momentum=0.9)
    outcome = run(task, settings, backend="loop")
    model = copy.deepcopy(task.model)
    order = task.clients[0][epoch_orders(0, 0, 1, 8)[0]]
    for indices in batches(order, 4):
        inputs, targets = task.train.batch(indices)
        if bool(inputs.isfinite().all()):
            task.loss(model(inputs), targets).backward()
    expected = {name: p.detach() - settings.lr * p.grad for name, p in model.named_parameters()}  # type: ignore[operator]
    assert_rows_close(outcome.params, expected)
    assert list(outcome.history[0].refused) == [0]


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("upload", ["weights", "delta"])
def test_to_a_trusted_server_a_refused_client_sent_no_change(protocol: str, upload: str) -> None:
    """The number that the noisy sum is divided by must not depend on a client's data."""
    if protocol == "fedsgd" and upload == "delta":
        pytest.skip("FedSGD shares gradients")
    task = poisoned(small_task(norm=False, sizes=(4, 4, 4)), 1)
    settings = FederationSettings(protocol=protocol, rounds=1, batch_size=4, upload=upload)  # type: ignore[arg-type]
    done = run(task, settings, Central(factor=1.0), backend="loop")
    others = run(task, settings, backend="loop")  # the mean of the two others alone
    start = {name: p.detach() for name, p in task.model.named_parameters()}
    for name, weight in start.items():
        torch.testing.assert_close(done.params[name] - weight, (others.params[name] - weight) * 2 / 3)


def test_a_refused_client_is_not_captured_and_a_resume_knows_it(tmp_path: Path) -> None:
    task = poisoned(small_task(sizes=(4, 4)), 0)
    settings = FederationSettings(rounds=2, batch_size=4, record_rounds=(1, 2))
    whole = run(task, settings, folder=tmp_path)
    assert [(each.round, each.client) for each in whole.captured] == [(1, 1), (2, 1)]
    again = run(task, settings, folder=tmp_path, resume=True)
    assert [(each.round, each.client) for each in again.captured] == [(1, 1), (2, 1)]
    assert again.history == whole.history


# ---- batches of random size -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
def test_the_ledger_counts_the_steps_and_chances_that_there_are(
    settings: FederationSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = small_task(norm=False, sizes=(10, 3))  # neither is a multiple of the batch size
    asked: dict[int, list[float]] = {10: [], 3: []}
    planned: list[float] = []
    real, step = DPSGD.sample, DPSGD.gradient

    def sample(self: DPSGD, labels: Tensor, size: int, streams: Streams) -> Tensor:
        asked[len(labels)].append(min(1.0, size / len(labels)))
        return real(self, labels, size, streams)

    def gradient(self: DPSGD, batch: ClientBatch) -> StepResult:
        if batch.planned is not None:  # not in the dry step before training
            planned.extend(batch.planned.tolist())
        return step(self, batch)

    monkeypatch.setattr(DPSGD, "sample", sample)
    monkeypatch.setattr(DPSGD, "gradient", gradient)
    monkeypatch.setattr("fedveil.federation.prepare.dry_step", lambda prepared: None)
    run(task, settings, "dp-sgd", backend="loop")
    for size, exposure in zip((3, 10), exposures(task, settings), strict=True):
        assert asked[size] == [exposure.example_rate] * exposure.uses("gradient")
    assert set(planned) == {settings.batch_size}


# ---- buffers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
def test_local_buffers_stay_with_their_clients(protocol: FederationSettings) -> None:
    settings = replace(protocol, batch_size=5, record_rounds=(1,))
    task = small_task(sizes=(13, 8, 2, 19), buffers="local")
    done = run(task, settings)
    assert done.captured[0].capture.buffers is None
    shared = run(small_task(sizes=(13, 8, 2, 19)), settings)
    # Batch norm trains on its batch: how its statistics travel does not change the weights.
    assert_rows_equal(done.params, shared.params)
    # Client 2 makes one step in a round, client 3 four: nobody's count is reset by the server.
    prepared = Prepared(Plan(task, Chain(), settings), Engine(task.model, task.loss))
    server, memory = run_rounds(prepared, *[[0, 1, 2, 3]] * 2)
    counts = [int(memory.buffers[client]["1.num_batches_tracked"]) for client in range(4)]
    assert counts == [2 * n * protocol.local_epochs for n in (3, 2, 1, 4)]
    assert int(server.buffers["1.num_batches_tracked"]) == 0


def test_a_client_without_buffers_of_its_own_starts_from_those_that_were_sent() -> None:
    memory = ClientMemory(buffers={2: {"mean": torch.ones(2)}, 0: {"mean": torch.full((2,), 4.0)}})
    sent = {"mean": torch.zeros(2)}
    assert memory.buffers_of([0, 1, 2], sent)["mean"].tolist() == [[4, 4], [0, 0], [1, 1]]
    assert memory.buffers_of([1, 3], sent)["mean"].tolist() == [[0, 0], [0, 0]]
    assert memory.statistics(sent)["mean"].tolist() == [2.5, 2.5]
    assert ClientMemory().statistics(sent) is sent


def test_recalibrated_buffers_are_the_statistics_of_the_validation_data() -> None:
    task = small_task(sizes=(13, 8, 2, 19), buffers="recalibrated")
    done = run(task, replace(FEDSGD, batch_size=5))
    inputs, _ = task.validation.batch(range(30))  # type: ignore[union-attr]
    hidden = inputs @ done.params["0.weight"].T + done.params["0.bias"]  # type: ignore[operator]
    torch.testing.assert_close(done.buffers["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(done.buffers["1.running_var"], hidden.var(0))


# ---- what is noted -------------------------------------------------------------------------------------------


def test_history_and_observers() -> None:
    task = small_task(norm=False)  # 13, 8, 3 and 21 examples: 4, 2, 1 and 6 batches of 4
    noted = Noted()
    done = run(task, replace(FEDSGD, rounds=2), observers=[noted])
    assert noted.calls[:3] == [("start", 0), ("round", 1, [0, 1, 2, 3]), ("step", 1, 0)]
    assert [call for call in noted.calls if call[0] == "step"] == [("step", r, s) for r in (1, 2) for s in range(6)]
    assert noted.calls[-3:] == [("end", 2), ("finish",), ("stop",)]
    weights = sum(p.numel() for p in task.model.parameters()) * 4
    assert [record.bytes_up for record in done.history] == [round(weights * 13 / 4)] * 2
    assert done.values is not None
    assert float(done.values.double().mean()) == done.utility.test == done.history[-1].utility.test
    assert run(task, FEDAVG).history[0].bytes_down == weights


def test_it_learns() -> None:
    done = run(small_task(norm=False), FederationSettings(rounds=15, batch_size=4))
    assert done.untrained.test is not None
    assert done.utility.test is not None
    assert done.utility.test > max(0.7, done.untrained.test)
    assert done.history[-1].train_loss < done.history[0].train_loss


def test_early_stopping_keeps_the_best_model() -> None:
    task = small_task(norm=False)
    settings = FederationSettings(rounds=60, batch_size=4, lr=0.05, patience=4)
    done = run(task, settings)
    scores = [record.utility.validation for record in done.history]
    assert done.early_stopped
    assert len(scores) < 60
    assert done.chosen_round == scores.index(max(scores)) + 1 == len(scores) - 4  # type: ignore[type-var]
    again = run(task, replace(settings, rounds=done.chosen_round, patience=None))
    assert_rows_equal(done.params, again.params)
    assert torch.equal(done.values, again.values)  # type: ignore[arg-type]


# ---- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"rounds": 3, "record_rounds": (4,)}, "between 1 and 3"),
        ({"record_rounds": (0,)}, "record_rounds"),
        ({"record_rounds": (2, 2)}, "twice"),
        ({"lr_steps": ((5, 0.1), (3, 0.1))}, "order"),
        ({"local_epochs": 2}, "fedavg"),
        ({"upload": "delta"}, "fedavg"),
        ({"sampling_rate": 0}, "sampling_rate"),
        ({"momentum": 1}, "momentum"),
        ({"protocol": "fedprox"}, "fedsgd"),
    ],
)
def test_bad_settings_are_one_line(fields: dict[str, object], said: str) -> None:
    with pytest.raises(FedveilError, match=said) as caught:
        FederationSettings(**fields)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_evaluation_some_rounds_apart() -> None:
    settings = replace(FEDAVG, rounds=5, batch_size=9, local_utility=1)
    often, seldom = run(small_task(), settings), run(small_task(), replace(settings, evaluate_every=2))
    assert [record.utility.test is not None for record in seldom.history] == [False, True, False, True, True]
    assert [record.utility for record in seldom.history][1::2] == [record.utility for record in often.history][1::2]
    assert seldom.utility == often.utility
    assert seldom.utility.beside
    assert_rows_equal(seldom.params, often.params)


def test_learning_rate_by_round() -> None:
    settings = FederationSettings(rounds=30, lr=0.02, lr_steps=[[10, 2e-3], [20, 2e-5]])  # type: ignore[arg-type]
    assert [settings.lr_at(n) for n in (1, 9, 10, 19, 20, 30)] == [0.02, 0.02, 2e-3, 2e-3, 2e-5, 2e-5]


def test_a_batch_of_one_under_batch_norm_is_told() -> None:
    with pytest.raises(FedveilError, match="batch of 1 that client 0 has in round 1, step 3"):
        run(small_task(), FEDSGD)


def test_what_cannot_work_is_refused_before_training() -> None:
    task = small_task(norm=False)
    bare = Task(task.model, (task.train.batch(range(45)), task.test.batch(range(24))), clients=2)
    with pytest.raises(FedveilError, match=r"patience.*validation"):
        run(bare, replace(FEDSGD, patience=2))
    with pytest.raises(FedveilError, match="resume needs the folder"):
        run(task, FEDSGD, resume=True)
