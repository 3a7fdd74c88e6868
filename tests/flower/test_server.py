"""The server's rounds, over a grid of functions."""

from __future__ import annotations

import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

import fedveil.flower.exchange
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture
from fedveil.federation.schedule import sampled_clients
from fedveil.flower import LocalSteps, Server, ServerSettings, introduce, protect, taking
from fedveil.flower.exchange import Exchange
from fedveil.flower.roster import Roster
from fedveil.ownership import owned
from flower.exchange import arrays_of, context, replied, small_model
from flower.grids import Answer, Clock, FakeGrid


def client(by: float, examples: int = 10, **damage: Tensor) -> ClientApp:
    """A client that moves every weight by as much; `damage` replaces arrays."""
    app = ClientApp()
    introduce(app)

    @app.train()
    def train(message: Message, _: Context) -> Message:
        sent = arrays_of(message)
        moved = {name: t + by if t.is_floating_point() else t for name, t in sent.items()}
        return replied(message, {**moved, **damage}, {"num-examples": examples, "train-loss": by})

    return app


def moved(arrays: dict[str, Tensor], since: dict[str, Tensor] | None = None) -> float:
    start = small_model().state_dict() if since is None else since
    change = arrays["0.weight"] - start["0.weight"]
    assert torch.allclose(change, change.flatten()[0], atol=1e-6)
    return change.flatten()[0].item()


def run(apps: dict[int, Any], folder: Path | None = None, **settings: Any) -> tuple[Any, FakeGrid]:
    grid = FakeGrid(apps)
    given = {"rounds": 1, "minimum": 1, "wait": 1.0, "limit": 5.0, **settings}
    server = Server(ServerSettings(**given), folder=folder, local=LocalSteps(batch_size=4, lr=0.1))
    return server.start(grid, small_model().state_dict()), grid


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(fedveil.flower.exchange.Exchange.__init__, "__defaults__", (clock, clock.sleep))
    monkeypatch.setattr(Roster.__init__, "__defaults__", (clock,))
    monkeypatch.setattr("fedveil.flower.roster.time.sleep", clock.sleep)


def test_the_mean_counts_clients_equally_or_by_their_examples() -> None:
    apps = {0: client(1.0, 30), 1: client(4.0, 10)}
    assert moved(run(apps)[0].arrays) == pytest.approx(2.5, rel=1e-5)
    assert moved(run(apps, weighting="size")[0].arrays) == pytest.approx(1.75, rel=1e-5)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"aggregation": "median"}, 3.0),
        ({"aggregation": "trimmed-mean", "trim": 0.2}, 10 / 3),
        ({"aggregation": "krum", "malicious": 1, "minimum": 5}, None),
    ],
)
def test_flower_s_robust_strategies_can_be_chosen(settings: dict[str, Any], expected: float | None) -> None:
    apps = {place: client(by) for place, by in enumerate((2.0, 3.0, 1000.0, 3.0, 4.0))}
    found = moved(run(apps, **settings)[0].arrays)
    assert found == pytest.approx(expected, rel=1e-4) if expected else found < 5


def test_whole_numbers_stay_whole() -> None:
    outcome, _ = run({0: client(1.0), 1: client(1.0)})
    assert outcome.arrays["1.num_batches_tracked"].dtype == torch.int64


BAD = {
    1: (client(1.0, **{"0.bias": torch.full((5,), torch.nan)}), "not finite (NaN or infinity) in 0.bias"),
    2: (client(1.0, **{"0.bias": torch.zeros(9)}), "0.bias of shape (9,), not (5,)"),
    3: (client(1.0, **{"0.bias": torch.full((5,), 1e12)}), "has a norm of 2.24e+12, above 100"),
    4: (client(1.0, **{"back door": torch.zeros(2)}), "has back door, which is not in the model"),
    5: (client(1.0, examples=-4), "counts for -4 examples"),
}


def test_offenders_are_refused_by_name_and_the_round_goes_on() -> None:
    apps: dict[int, Any] = {0: client(2.0), **{place: app for place, (app, _) in BAD.items()}, 6: client(4.0)}
    outcome, _ = run(apps, longest=100.0)
    assert moved(outcome.arrays) == pytest.approx(3.0, rel=1e-5)
    line = outcome.history[0]
    assert line.taken == [0, 6]
    assert line.refused.keys() == BAD.keys()
    for place, (_, why) in BAD.items():
        assert why in line.refused[place]


def raw(header: str) -> bytes:
    """What NumPy reads as the head of an array."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


HOSTILE = {
    "a broken archive": b"PK\x03\x04" + bytes(40),
    "more than there is memory": raw("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,), }\n"),
    "a header that does not end": raw("{'descr': ('<f4', 'shape': (5,"),
    "an object": raw("{'descr': '|O', 'fortran_order': False, 'shape': (5,), }\n") + b"cos\nsystem\n(S'true'\ntR.",
    "nothing": b"",
    "fields": raw("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (5,), }\n") + bytes(20),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_bytes_that_are_no_array_are_refused_and_the_round_goes_on(kind: str) -> None:
    app = ClientApp()
    introduce(app)

    @app.train()
    def train(message: Message, _: Context) -> Message:
        reply = replied(message, arrays_of(message))
        reply.content["arrays"]["0.bias"] = Array("float32", (5,), "numpy.ndarray", HOSTILE[kind])
        return reply

    outcome, _ = run({0: client(2.0), 1: app})
    assert outcome.history[0].taken == [0]
    assert "'0.bias' cannot be read" in outcome.history[0].refused[1]


def test_whatever_else_breaks_on_a_reply_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read = taking.to_tensors

    def breaks(record: Any) -> dict[str, Tensor]:
        found = read(record)
        if (found["0.weight"] > 50).any():
            raise RecursionError
        return found

    monkeypatch.setattr(taking, "to_tensors", breaks)
    outcome, _ = run({0: client(2.0), 1: client(99.0)})
    assert outcome.history[0].refused == {1: "the update could not be read (RecursionError)"}


def test_a_client_that_claims_a_billion_examples_costs_the_server_nothing(tmp_path: Path) -> None:
    apps = {0: client(2.0, 9), 1: client(3.0, 10**9)}
    tracemalloc.start()
    try:
        outcome, _ = run(apps, tmp_path, record_rounds=(1,))
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert outcome.history[0].taken == [0, 1]
    assert [file.name for file in (tmp_path / "captures").iterdir()] == ["round-0001-client-0000.safetensors"]


def test_a_client_that_does_not_tell_its_examples_is_taken_and_not_captured(tmp_path: Path) -> None:
    app = ClientApp()
    introduce(app)
    app.train()(lambda message, _: replied(message, arrays_of(message), {"loss": 0.5}))
    outcome, _ = run({0: client(2.0, 9), 1: app}, tmp_path, record_rounds=(1,))
    assert outcome.history[0].taken == [0, 1]
    assert outcome.history[0].examples == {0: 9}
    assert [file.name for file in (tmp_path / "captures").iterdir()] == ["round-0001-client-0000.safetensors"]


def test_of_a_client_s_metrics_those_are_kept_whose_names_a_tracker_takes() -> None:
    app = ClientApp()
    introduce(app)
    hostile = {"num-examples": 3, "loss": 0.5, "a@b": 1.0, "line\nbreak": 1.0, "x" * 200: 1.0, "list": [1.0]}
    flood = {f"m{number:03}": 1.0 for number in range(500)}
    app.train()(lambda message, _: replied(message, arrays_of(message), {**hostile, **flood}))
    outcome, _ = run({0: app})
    told = outcome.history[0].metrics
    assert told["loss"] == 0.5
    assert told.keys() <= {"loss", *flood}
    assert len(told) < 100


def test_a_node_that_claims_a_far_partition_makes_no_room_for_others() -> None:
    outcome, _ = run({0: client(1.0), 2**31 - 1: client(3.0)}, rounds=2)
    assert [line.asked for line in outcome.history] == [[0, 2**31 - 1]] * 2
    assert moved(outcome.arrays) == pytest.approx(4.0, rel=1e-5)


def test_a_node_cannot_take_over_the_partition_of_another() -> None:
    grid = FakeGrid({0: client(1.0), 1: client(5.0)})
    first = next(node for node, partition in grid.nodes.items() if partition == 0)
    roster = Roster(Exchange(grid))
    assert roster.present(1.0)[0] == first
    grid.nodes[1] = 7  # a new node, the smallest of all
    grid.apps[7], grid.contexts[7] = client(9.0), context({}, 0)
    assert roster.present(1.0)[0] == first


def silent(message: Message, held: Context) -> Message | None:
    return client(1.0)(message, held) if message.metadata.message_type.startswith("query") else None


def test_a_client_that_is_silent_or_gone_is_told_by_its_message() -> None:
    grid = FakeGrid({0: client(1.0), 1: silent, 2: client(3.0), 3: client(9.0)})

    answer = grid.apps[3]

    def dies(message: Message, held: Context) -> Message | None:
        if message.metadata.message_type == "train":
            grid.gone.add(3)
            return grid._answer(message)
        return answer(message, held)  # type: ignore[operator]

    grid.apps[3] = dies
    server = Server(ServerSettings(rounds=2, minimum=2, wait=1.0, limit=5.0))
    outcome = server.start(grid, small_model().state_dict())
    first, second = outcome.history
    assert first.lost == {1: "no reply within 5 s"}
    assert first.failed == {3: "the node is gone"}
    assert second.lost == {1: "still busy with an earlier round", 3: "not connected"}
    assert moved(outcome.arrays) == pytest.approx(4.0, rel=1e-5)


def test_a_round_in_which_nobody_replies_asks_for_a_longer_limit(caplog: pytest.LogCaptureFixture) -> None:
    outcome, _ = run({0: silent, 1: silent})
    assert not outcome.history[0].changed
    assert "is limit, 5 s, longer than a client trains?" in caplog.text


def test_a_round_with_too_few_updates_leaves_the_model_as_it_is() -> None:
    nan = client(1.0, **{"0.bias": torch.full((5,), torch.nan)})
    outcome, _ = run({0: client(1.0), 1: nan}, minimum=2)
    assert not outcome.history[0].changed
    assert moved(outcome.arrays) == 0


def test_too_few_nodes_end_the_run_after_a_bounded_wait() -> None:
    with pytest.raises(FedveilError, match=r"1 nodes were there after 1 s, and 3 are needed"):
        run({0: client(1.0)}, minimum=3)


def test_clients_are_sampled_by_partition_from_the_seed_as_in_the_engine() -> None:
    apps = {place: client(1.0) for place in range(8)}
    outcome, _ = run(apps, rounds=3, sampling_rate=0.5, seed=4, clients=8)
    assert [line.asked for line in outcome.history] == [sampled_clients(4, 8, 0.5, number) for number in (1, 2, 3)]


def test_nodes_that_do_not_tell_their_partition_are_numbered() -> None:
    def dumb() -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, _: Context) -> Message:
            return replied(message, arrays_of(message))

        return app

    outcome, _ = run({4: dumb(), 9: dumb()})
    assert outcome.history[0].taken == [0, 1]


def test_a_second_node_with_the_same_partition_is_left_out() -> None:
    grid = FakeGrid({0: client(1.0), 1: client(5.0)})
    grid.contexts[1].node_config["partition-id"] = 0
    assert list(Roster(Exchange(grid)).present(1.0)) == [0]


# ---- what is kept ------------------------------------------------------------------------------------------


class Dies(Exception):
    pass


def killed_in(number: int) -> Answer:
    inner = client(1.0)

    def app(message: Message, held: Context) -> Message:
        if message.metadata.group_id == str(number):
            raise Dies
        return inner(message, held)

    return app


def test_a_server_that_died_goes_on_after_the_last_whole_round_and_forgets_no_spending(tmp_path: Path) -> None:
    def server() -> Server:
        settings = ServerSettings(rounds=4, minimum=1, wait=1.0, limit=5.0)
        return Server(settings, folder=tmp_path, defense="dp-gaussian:epsilon=1,at=upload")

    start = small_model().state_dict()
    with pytest.raises(Dies):
        server().start(FakeGrid({0: client(1.0), 1: killed_in(3)}), start)
    ahead = json.loads((tmp_path / "ledger.json").read_text())
    assert [line["times"] for line in ahead["spent"]] == [3, 3], "round 3 may have been sent"
    elsewhere = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    outcome = server().start(FakeGrid({0: client(1.0), 1: client(1.0)}), elsewhere)
    assert moved(outcome.arrays, start) == pytest.approx(4.0, rel=1e-5)
    assert [line.round for line in outcome.history] == [1, 2, 3, 4]
    assert outcome.ledger.count(0) == 5
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert outcome.ledger.statement().epsilon is not None


def test_a_folder_has_one_server_at_a_time(tmp_path: Path) -> None:
    taken, done = threading.Event(), threading.Event()

    def other() -> None:
        with owned(tmp_path):
            taken.set()
            done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert taken.wait(30)
    with pytest.raises(FedveilError, match="is in use by"):
        run({0: client(1.0)}, tmp_path)
    done.set()
    thread.join()
    assert run({0: client(1.0)}, tmp_path)[0].history


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run({0: client(1.0)}, tmp_path)
    with pytest.raises(FedveilError, match="settings weighting was uniform, is now size"):
        run({0: client(1.0)}, tmp_path, weighting="size")


def test_a_checkpoint_whose_ledger_is_gone_is_not_gone_on_from(tmp_path: Path) -> None:
    run({0: client(1.0), 1: client(1.0)}, tmp_path, rounds=1)
    (tmp_path / "ledger.json").unlink()
    with pytest.raises(FedveilError, match=r"has no ledger\.json beside it"):
        run({0: client(1.0), 1: client(1.0)}, tmp_path, rounds=2)


def test_a_ledger_that_cannot_be_read_stops_the_run(tmp_path: Path) -> None:
    run({0: client(1.0)}, tmp_path)
    (tmp_path / "ledger.json").write_text("{")
    with pytest.raises(FedveilError, match="nobody knows what was spent"):
        run({0: client(1.0)}, tmp_path, rounds=2)


def test_clients_that_sent_an_error_have_spent_nothing() -> None:
    app = ClientApp(mods=[protect("fedem")])
    introduce(app)
    app.train()(lambda message, _: replied(message, arrays_of(message)))
    outcome, _ = run({0: client(1.0), 1: app})
    assert "fedem acts before" in outcome.history[0].failed[1]
    assert (outcome.ledger.count(0), outcome.ledger.count(1)) == (1, 0)


def test_steps_behind_an_update_that_was_refused_or_lost_are_counted_as_before(tmp_path: Path) -> None:
    """Only the client knows what it sent: the last that it told stands for it."""
    good = client(1.0, 40)

    def second(otherwise: Any) -> Answer:
        def app(message: Message, held: Context) -> Message | None:
            return good(message, held) if message.metadata.group_id != "2" else otherwise(message, held)

        return app

    nan = client(1.0, 8, **{"0.bias": torch.full((5,), torch.nan)})
    grid = FakeGrid({0: second(nan), 1: second(silent), 2: good})
    settings = ServerSettings(rounds=2, minimum=1, wait=1.0, limit=5.0)
    local = LocalSteps(batch_size=4, lr=0.1, local_epochs=3)
    server = Server(settings, folder=tmp_path, local=local, defense="dp-sgd")
    server.start(grid, small_model().state_dict())
    spent = json.loads((tmp_path / "ledger.json").read_text())["spent"]
    assert [(line["client"], line["gradients"], line["example_rate"], line["times"]) for line in spent] == [
        (client, 30, 0.1, 2) for client in range(3)
    ]


def test_a_guarantee_of_every_step_needs_to_know_how_many_there_were() -> None:
    with pytest.raises(FedveilError, match="dp-sgd acts on every local step: give local="):
        Server(defense="dp-sgd")
    Server(defense="dp-gaussian:at=upload")
    Server(ServerSettings(kind="gradient"), defense="dp-sgd")
    app = ClientApp()
    introduce(app)
    app.train()(lambda message, _: replied(message, arrays_of(message), {"loss": 0.5}))
    settings = ServerSettings(rounds=1, minimum=1, wait=1.0)
    server = Server(settings, local=LocalSteps(batch_size=4, lr=0.1), defense="dp-sgd")
    outcome = server.start(FakeGrid({0: client(1.0, 8), 1: app}), small_model().state_dict())
    assert outcome.history[0].taken == [0]
    assert "does not tell num-examples" in outcome.history[0].refused[1]


def test_chosen_updates_are_captured_as_the_server_saw_them(tmp_path: Path) -> None:
    apps = {0: client(1.0, 9), 1: client(2.0, 9)}
    run(apps, tmp_path, rounds=2, record_rounds=(2,), record_clients=1)
    files = sorted((tmp_path / "captures").iterdir())
    assert [file.name for file in files] == ["round-0002-client-0000.safetensors"]
    seen = Capture.load(files[0])
    seen.check(small_model())
    assert (seen.kind, seen.round, seen.batch_sizes, seen.lr) == ("weights", 2, (4, 4, 1), (0.1, 0.1, 0.1))
    assert moved(seen.before) == pytest.approx(1.5, rel=1e-5)
    assert moved(seen.shared, seen.before) == pytest.approx(1.0, rel=1e-5)
    assert "1.running_mean" in (seen.buffers or {})


def test_gradients_move_the_model_by_the_server_s_step() -> None:
    app = ClientApp()
    introduce(app)

    @app.train()
    def train(message: Message, _: Context) -> Message:
        weights = dict(small_model().named_parameters())
        return replied(message, {name: torch.full_like(p, 2.0) for name, p in weights.items()})

    outcome, _ = run({0: app, 1: app}, kind="gradient", rounds=2, lr=0.1, momentum=0.5)
    assert moved(outcome.arrays) == pytest.approx(-0.1 * 2 - 0.1 * 3, rel=1e-5)
    assert torch.equal(outcome.arrays["1.running_var"], torch.ones(5))


def test_results_go_to_rounds_jsonl_and_to_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, dict[str, float]]] = []
    monkeypatch.setattr(
        "fedveil.flower.server.trackers", lambda names, folder: [lambda n, v: told.append((n, dict(v)))]
    )
    server = Server(ServerSettings(rounds=1, minimum=1, wait=1.0), folder=tmp_path)
    server.start(
        FakeGrid({0: client(0.5)}), small_model().state_dict(), evaluate=lambda n, _: {"accuracy": 0.5, "bad": np.nan}
    )
    line = json.loads((tmp_path / "rounds.jsonl").read_text())
    assert line["evaluation"] == {"accuracy": 0.5}
    assert line["metrics"] == {"train-loss": 0.5}
    assert told[0][0] == 1
    assert told[0][1]["accuracy"] == 0.5


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int, values: dict[str, float]) -> None:
        raise ConnectionError("no tracker there")

    monkeypatch.setattr("fedveil.flower.server.trackers", lambda names, folder: [fails])
    outcome, _ = run({0: client(0.5), 1: client(0.5)}, tmp_path, rounds=2)
    assert len(outcome.history) == 2


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.flower.tracking.find_spec", lambda name: None)
    for name in ("tensorboard", "mlflow"):
        with pytest.raises(FedveilError, match=f"pip install {name}"):
            Server(ServerSettings(track=(name,)))  # type: ignore[arg-type]


def test_krum_needs_enough_updates() -> None:
    with pytest.raises(FedveilError, match="needs a minimum of 5"):
        ServerSettings(aggregation="krum", malicious=1)
