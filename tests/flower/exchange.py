"""Messages and contexts for tests that call mods and servers directly, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedveil.flower.records import to_record, to_tensors


def small_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def asked(arrays: Mapping[str, Tensor] | None = None, *, number: int = 1, kind: str = "train") -> Message:
    """What a server sends."""
    tensors = small_model().state_dict() if arrays is None else arrays
    content = RecordDict({"arrays": to_record(tensors), "config": ConfigRecord({"server-round": number})})
    message = Message(content, dst_node_id=7, message_type=kind, group_id=str(number))
    message.metadata.__dict__["_message_id"] = f"message-{number}"
    return message


def context(run: Mapping[str, Any] | None = None, partition: int = 0, state: RecordDict | None = None) -> Context:
    held = RecordDict() if state is None else state
    return Context(1, 7, {"partition-id": partition, "num-partitions": 4}, held, dict(run or {}))


def trained(by: float = 0.25) -> Callable[[Message, Context], Message]:
    """A client app: it moves every floating array by as much, and tells of it."""

    def app(message: Message, _: Context) -> Message:
        sent = to_tensors(message.content["arrays"])
        moved = {name: t + by if t.is_floating_point() else t + 3 for name, t in sent.items()}
        return replied(message, moved, {"num-examples": 12, "train-loss": 0.123456789, "losses": [0.5, 0.25]})

    return app


def replied(message: Message, arrays: Mapping[str, Tensor], metrics: Mapping[str, Any] | None = None) -> Message:
    told = MetricRecord(dict({"num-examples": 12} if metrics is None else metrics))
    return Message(RecordDict({"arrays": to_record(arrays), "metrics": told}), reply_to=message)


def sending(arrays: Mapping[str, Tensor], **metrics: Any) -> Callable[[Message, Context], Message]:
    """A client app that sends these arrays."""
    return lambda message, _: replied(message, arrays, metrics or None)


def arrays_of(message: Message) -> dict[str, Tensor]:
    record = message.content["arrays"]
    assert isinstance(record, ArrayRecord)
    return to_tensors(record)
