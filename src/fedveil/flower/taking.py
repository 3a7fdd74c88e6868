"""What a server makes of replies: each is checked, an offender is refused and named, the others are put together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum, Strategy

from fedveil.clients.engine import Tensors
from fedveil.errors import FedveilError, one_line
from fedveil.flower.records import MOST_EXAMPLES, to_record, to_tensors
from fedveil.flower.rules import NUM_EXAMPLES, Rules
from fedveil.flower.settings import ServerSettings
from fedveil.intake import Intake

MOST_METRICS = 64  # of a client
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_./ -]{0,79}")


@dataclass
class Taken:
    """The updates of a round that the server takes, by client, and why it does not take the others."""

    updates: dict[int, Tensors] = field(default_factory=dict)
    examples: dict[int, int] = field(default_factory=dict)  # of those that tell how many they have
    messages: dict[int, Message] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # an update came and is not taken
    failed: dict[int, str] = field(default_factory=dict)  # an error came in its place
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    bytes_up: int = 0


def take(
    replies: Mapping[int, Message], sent: Tensors, settings: ServerSettings, rules: Rules, counts_steps: bool = False
) -> Taken:
    """Check the replies of a round, by client, against the arrays that they were sent.

    counts_steps: the ledger needs to know how many examples a client has.
    """
    taken = Taken()
    for client, reply in sorted(replies.items()):
        if reply.has_error():
            taken.failed[client] = one_line(str(reply.error.reason or f"error {reply.error.code}"))
            continue
        try:
            update, examples, metrics = _read(reply.content, sent, settings, rules)
            if examples is None and (counts_steps or settings.weighting == "size"):
                raise FedveilError("the reply does not tell num-examples, without which it cannot count")
        except FedveilError as error:
            taken.refused[client] = str(error)
            continue
        except Exception as error:  # a hostile client chose the bytes: whatever it broke, the round goes on
            taken.refused[client] = f"the update could not be read ({type(error).__name__})"
            continue
        taken.updates[client], taken.messages[client] = update, reply
        if examples is not None:
            taken.examples[client] = examples
        taken.metrics[client] = metrics
        taken.bytes_up += sum(tensor.numel() * tensor.element_size() for tensor in update.values())
    return taken


def _read(
    content: RecordDict, sent: Tensors, settings: ServerSettings, rules: Rules
) -> tuple[Tensors, int | None, dict[str, float]]:
    arrays = list(content.array_records.values())
    if len(arrays) != 1:
        raise FedveilError(f"the reply has {len(arrays)} records of arrays, not 1")
    update = to_tensors(arrays[0])
    gradient = settings.kind == "gradient"  # beside which buffers need not be sent
    like = {name: t for name, t in sent.items() if not gradient or name in update or not rules.is_buffer(name)}
    wrong = Intake(like, longest=torch.inf).refuse(update)
    if not wrong:
        change = update if gradient else _change(update, sent)
        wrong = Intake(change, longest=settings.longest).refuse(change)
    if wrong:
        raise FedveilError(f"the update {wrong}")
    metrics = dict(islice(_metrics(content), MOST_METRICS))
    examples = metrics.pop(NUM_EXAMPLES, None)
    if examples is not None and not 1 <= examples <= MOST_EXAMPLES:
        raise FedveilError(f"the update counts for {examples:g} examples: from 1 to {MOST_EXAMPLES:,} would be right")
    return {name: update[name] for name in like}, None if examples is None else int(examples), metrics


def _metrics(content: RecordDict) -> Iterator[tuple[str, float]]:
    """Single numbers under names that trackers take."""
    for record in content.metric_records.values():
        for name, value in record.items():
            if _NAME.fullmatch(name) and isinstance(value, int | float) and math.isfinite(value):
                yield name, float(value)


def _change(update: Tensors, sent: Tensors) -> Tensors:
    return {name: tensor - sent[name] for name, tensor in update.items() if tensor.is_floating_point()}


def strategy_of(settings: ServerSettings) -> Strategy:
    """Flower's own strategy for these settings."""
    match settings.aggregation:
        case "median":
            return FedMedian()
        case "trimmed-mean":
            return FedTrimmedAvg(beta=settings.trim)
        case "krum":
            return Krum(num_malicious_nodes=settings.malicious)
    return FedAvg()


def together(taken: Taken, number: int, settings: ServerSettings, strategy: Strategy) -> Tensors:
    """The updates put together by a strategy, in the order of the clients and in the types that were sent."""
    replies = []
    for client, update in taken.updates.items():
        weight = taken.examples[client] if settings.weighting == "size" else 1
        content = RecordDict({"arrays": to_record(update), "metrics": MetricRecord({NUM_EXAMPLES: weight})})
        replies.append(Message(content, reply_to=taken.messages[client]))
    try:
        arrays, _ = strategy.aggregate_train(number, replies)
    except Exception as error:  # a strategy may be anybody's
        raise FedveilError(
            f"{type(strategy).__name__} could not put {len(replies)} updates together: {one_line(error, typed=True)}"
        ) from None
    if not isinstance(arrays, ArrayRecord):
        raise FedveilError(f"{type(strategy).__name__} made nothing of {len(replies)} updates")
    like = next(iter(taken.updates.values()))
    return {name: _typed(tensor, like[name].dtype) for name, tensor in to_tensors(arrays).items()}


def _typed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Flower's means of whole numbers are fractions."""
    return tensor.to(dtype) if dtype.is_floating_point else tensor.round().to(dtype)
