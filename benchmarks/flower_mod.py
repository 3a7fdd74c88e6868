"""What the Flower mod costs: its share of a client's local epoch. One thread, processor time."""

from __future__ import annotations

import time
from statistics import median

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch.nn import functional

from benchmarks.tables import Table
from fedveil.flower import protect
from fedveil.registry import models

SHAPE, CLASSES, IMAGES, BATCH, TURNS = (3, 32, 32), 10, 600, 32, 5
ROWS = ("gradient-dropout:keep=0.8,at=upload", "spm:epsilon=1", "dp-gaussian:epsilon=1,at=upload")


def measure() -> list[Table]:
    torch.set_num_threads(1)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # Flower makes messages in a task only
    table = Table(
        f"The Flower mod on resnet18, {IMAGES} images of 32×32 a local epoch, one thread",
        ["defense", "mod (s)", "share of a local epoch"],
        "All that the mod does to a reply: reading the arrays, the defense with noise of the operating system, checks, "
        f"the ledger, new arrays. Processor time; the mod: median of {TURNS}; the epoch: median of 3.",
    )
    torch.manual_seed(0)
    model = models.build("resnet18").build(SHAPE, CLASSES)
    epoch = median(_epoch(model) for _ in range(3))
    for defense in ROWS:
        seconds = median(_mod(model, defense) for _ in range(TURNS))
        table.add(defense, f"{seconds:.2f}", f"{100 * seconds / epoch:.1f} %")
    return [table]


def _epoch(model: torch.nn.Module) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(IMAGES, *SHAPE), torch.randint(0, CLASSES, (IMAGES,))
    began = time.process_time()
    for start in range(0, IMAGES, BATCH):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[start : start + BATCH]), targets[start : start + BATCH]).backward()
        optimizer.step()
    return time.process_time() - began


def _mod(model: torch.nn.Module, defense: str) -> float:
    arrays = ArrayRecord(model.state_dict())
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    message = Message(content, dst_node_id=1, message_type="train")
    told = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": IMAGES})})
    reply = Message(told, reply_to=message)
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    mod = protect(defense)
    began = time.process_time()
    sent = mod(message, context, lambda *_: reply)
    seconds = time.process_time() - began
    assert sent.has_content()
    return seconds


if __name__ == "__main__":
    for each in measure():
        print(each)
