"""Flower's records as tensors by name, and back. Nothing of a reply is passed on: it is rebuilt from what was read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.errors import FedveilError
from fedveil.flower.rules import NUM_EXAMPLES, Rules
from fedveil.tensors import own_memory
from fedveil.tree import REAL

MOST_EXAMPLES = 10**9
PARTITION = "partition-id"
# Flower's older API (NumPyClient, SecAgg+) has fixed names for its records.
OLD_ASKED, OLD_SENT = "fitins.parameters", "fitres.parameters"
OLD_COUNT, OLD_METRICS, OLD_STATUS = "fitres.num_examples", "fitres.metrics", "fitres.status"


class Parts(NamedTuple):
    """Arrays, told apart."""

    weights: Tensors
    buffers: Tensors


def to_tensors(record: Mapping[str, Array]) -> Tensors:
    """The arrays of a record; one that cannot be read is named."""
    found = {}
    for name, array in record.items():
        try:
            found[name] = own_memory(torch.from_numpy(array.numpy()))
        except Exception:  # whoever made these bytes chose what NumPy stumbles over
            raise FedveilError(f"the array {name!r:.80} cannot be read: send NumPy arrays of numbers") from None
    return found


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as a record."""
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()})


def told_apart(tensors: Tensors, rules: Rules) -> Parts:
    """Weights and buffers. What is no real number and not named as a buffer is refused: no defense could act on it."""
    weights, buffers = {}, {}
    for name, tensor in tensors.items():
        if rules.is_buffer(name):
            buffers[name] = tensor
        elif tensor.dtype in REAL:
            weights[name] = tensor
        else:
            raise FedveilError(
                f"{name!r:.80} is of type {tensor.dtype}, which no defense protects: name it in buffer_names if it is "
                "a buffer"
            )
    return Parts(weights, buffers)


def the_arrays(content: RecordDict, whose: str) -> tuple[str, ArrayRecord]:
    """The one record of arrays in a message, with its name."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise FedveilError(f"{whose} has {'several records' if found else 'no record'} of arrays: one is needed")
    return found[0]


def kept(content: RecordDict) -> RecordDict:
    """What a server sent, as it is now: an app may write into the message that it is given, or empty it."""
    held = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            held[name] = ArrayRecord(
                {key: Array(a.dtype, tuple(a.shape), a.stype, a.data) for key, a in record.items()}
            )
        else:
            held[name] = type(record)(dict(record))  # type: ignore[arg-type]
    return held


def is_old(content: RecordDict) -> bool:
    """Whether a message is of Flower's older API."""
    return OLD_ASKED in content.array_records


def check_configs(reply: RecordDict, *, old: bool) -> None:
    """Refuse a reply with settings in it: texts and bytes can hold anything, and nobody reads them."""
    for name, record in reply.config_records.items():
        if len(record) and not (old and name in (OLD_METRICS, OLD_STATUS)):
            raise FedveilError("the reply holds a record of settings, which may hold anything")
    status = reply.config_records.get(OLD_STATUS, ConfigRecord()) if old else ConfigRecord()
    if status.get("code", 0) != 0:
        raise FedveilError("the client app reports that its training failed")


def limited(reply: RecordDict, rules: Rules, *, also: Sequence[str] = (), old: bool = False) -> MetricRecord:
    """Of all metrics the single numbers that the rules let through, rounded. The others are dropped."""
    kept: dict[str, int | float] = {}
    for record in reply.metric_records.values():
        for name, value in record.items():
            told = NUM_EXAMPLES if old and name == "num_examples" else name
            if told in (*rules.metrics, *also):
                kept[told] = _limited(told, value, rules.digits)
    return MetricRecord(dict(sorted(kept.items())))  # in an order that tells nothing


def _limited(name: str, value: object, digits: int) -> int | float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise FedveilError(f"the metric {name} is not a single finite number")
    if name in (NUM_EXAMPLES, PARTITION):
        if value != int(value) or not 0 <= value <= MOST_EXAMPLES:
            raise FedveilError(f"the metric {name} is not a whole number between 0 and {MOST_EXAMPLES:,}")
        return int(value)
    rounded = float(f"{value:.{digits - 1}e}")
    return int(rounded) if isinstance(value, int) else rounded


def rebuilt(name: str, arrays: Mapping[str, Tensor], metrics: MetricRecord, *, old: bool) -> RecordDict:
    """A reply of new records, whose names are the server's own."""
    if not old:
        return RecordDict({name: to_record(arrays), "metrics": metrics})
    return RecordDict(
        {
            OLD_SENT: to_record(arrays),
            OLD_COUNT: MetricRecord({"num_examples": metrics.get(NUM_EXAMPLES, 0)}),
            OLD_METRICS: ConfigRecord(),
            OLD_STATUS: ConfigRecord({"code": 0, "message": ""}),
        }
    )
