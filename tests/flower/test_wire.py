"""What is on the wire: all parts of all replies, as bytes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedveil.flower import Server, ServerSettings, introduce, protect
from fedveil.flower.records import to_record, to_tensors
from flower.exchange import arrays_of, asked, context
from flower.grids import FakeGrid

CANARY = np.linspace(0.1, 0.9, 16, dtype=np.float32)
TEXT = "born 1961 in Ulm"


class Tapped(FakeGrid):
    """A grid that keeps every reply as the bytes that Flower would send."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        self.replies: list[Message] = []
        self.wire: list[bytes] = []

    def _answer(self, message: Message) -> Message | None:
        reply = super()._answer(message)
        if reply is not None:
            self.replies.append(reply)
            self.wire += [part.deflate() for part in get_all_nested_objects(reply).values()]
        return reply


def model() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3))


def leaking(message: Message, held: Context) -> Message:
    """An app that lets its one record out by every way there is, the bias of a first layer among them."""
    arrays = to_tensors(message.content["arrays"])
    moved = {name: tensor + 0.5 if tensor.is_floating_point() else tensor + 7 for name, tensor in arrays.items()}
    moved["0.weight"][:] = torch.from_numpy(CANARY)
    moved["1.running_mean"][:16] = torch.from_numpy(CANARY)
    metrics = {"num-examples": 1, TEXT: 3.0, "pixels": CANARY.tolist(), "loss": float(CANARY[3])}
    reply = Message(RecordDict({TEXT: to_record(moved), "m": MetricRecord(metrics)}), reply_to=message)
    reply.metadata.group_id = message.metadata.group_id = TEXT
    return reply


def contains(wire: list[bytes], what: bytes) -> bool:
    return any(what in part for part in wire)


@pytest.mark.parametrize(
    "defense", ["gaussian-noise:sigma=0.1,at=upload", "spm:epsilon=1", "gradient-dropout:keep=0.5,at=upload"]
)
def test_only_defended_tensors_leave_and_nothing_matches_the_canary(defense: str) -> None:
    app = ClientApp(mods=[protect(defense)])
    introduce(app)
    app.train()(leaking)
    grid = Tapped({0: app, 1: app})
    outcome = Server(ServerSettings(rounds=2)).start(grid, model().state_dict())
    assert outcome.history[-1].taken == [0, 1]
    assert not contains(grid.wire, CANARY.tobytes())
    assert not contains(grid.wire, CANARY.astype(np.float64).tobytes())
    assert not contains(grid.wire, TEXT.encode())
    for reply in grid.replies:
        if "arrays" not in reply.content:
            continue
        assert reply.metadata.group_id in ("1", "2")
        sent, server = arrays_of(reply), model().state_dict()
        assert sent.keys() == server.keys()
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            assert torch.equal(sent[name], server[name]), "no buffer of a client's"


def test_without_the_mod_the_canary_is_found() -> None:
    app = ClientApp()
    introduce(app)
    app.train()(leaking)
    grid = Tapped({0: app, 1: app})
    Server(ServerSettings(rounds=1)).start(grid, model().state_dict())
    assert contains(grid.wire, CANARY.tobytes())
    assert contains(grid.wire, TEXT.encode())


def test_noise_is_independent_across_clients_and_rounds_and_after_a_resume() -> None:
    start = {"w": torch.zeros(20_000)}

    def same(message: Message, _: Context) -> Message:
        return Message(
            RecordDict({"arrays": to_record(start), "m": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    drawn = []
    for _ in range(2):  # the second time is a client that was started again
        for partition in range(2):
            held = context({"defense": "gaussian-noise:sigma=1,at=upload"}, partition)
            for number in (1, 2):
                drawn.append(arrays_of(protect()(asked(start, number=number), held, same))["w"])
    for one, other in combinations(drawn, 2):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) < 6 / len(one) ** 0.5
        assert not torch.isin(one, other).float().mean() > 0.01
