"""Small tasks, defenses and observers for these tests. The defenses are not registered: other tests list all names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedveil.clients.batch import ClientBatch
from fedveil.defenses.base import Call, Defense
from fedveil.federation.observers import Observer
from fedveil.fields import NonNegative, declared
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs
from fedveil.tasks.task import Task
from fedveil.tree import Tree

FEATURES, CLASSES = 6, 3
UNEQUAL = (13, 8, 3, 21)  # examples of each client: ragged last batches, and clients that run out early


class Net(nn.Sequential):
    """Layers that take inputs in the type of their weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.to(self[0].weight.dtype))  # type: ignore[no-any-return]


def small_task(
    norm: bool = True,
    sizes: tuple[int, ...] = UNEQUAL,
    buffers: str = "shared",
    dtype: torch.dtype = torch.float32,
) -> Task:
    """A learnable toy problem with a network of two layers, with batch norm if wanted."""
    seed = 0
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, FEATURES, generator=generator)

    def part(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % CLASSES
        return centers[labels] + 0.7 * torch.randn(count, FEATURES, generator=generator), labels

    total = sum(sizes)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    clients = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(FEATURES, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.Tanh(), nn.Linear(5, CLASSES)]
        model = Net(*layers).to(dtype)
    data = (part(total), part(30), part(24))
    return Task(model, data, clients=clients, buffers=buffers, seed=seed)  # type: ignore[arg-type]


@declared
class Shift(Defense):
    """Moves the inputs by a step that grows over the batches of a round, and remembers it."""

    name = "test-shift"
    place = "data"
    by: NonNegative = 0.5

    def perturb(self, batch: ClientBatch) -> Inputs:
        steps = batch.state.get("steps", torch.zeros(batch.count)) + 1
        batch.state["steps"] = steps
        return batch.perturbed + self.by * steps[:, None, None] + 0.1 * batch.streams.normal_like(batch.perturbed)


@declared
class Feedback(Defense):
    """Adds what it held back the last time, over rounds: memory that lasts a run."""

    name = "test-feedback"
    state_scope = "run"

    def protect(self, update: Tree, call: Call) -> Tree:
        rest = {name: call.state.get(name, torch.zeros_like(tensor)) for name, tensor in update.items()}
        sent = {name: 0.5 * (tensor + rest[name]) for name, tensor in update.items()}
        for name, tensor in update.items():
            call.state[name] = tensor + rest[name] - sent[name]
        return Tree(sent)


@declared
class Central(Defense):
    """A trusted server that scales every update, and needs them all at once."""

    name = "test-central"
    place = "server"
    factor: NonNegative = 0.5

    def aggregate(self, updates: Tree, weights: Tensor, streams: Streams) -> Tree:
        assert updates.count == len(weights) == streams.count
        return updates * self.factor


@declared
class FirstExamples(Defense):
    """Composes every batch from the examples of the lowest labels."""

    name = "test-first"
    place = "sample"

    def sample(self, labels: Tensor, size: int, streams: Streams) -> Tensor:
        return labels.argsort(stable=True)[:size]


@declared
class Validated(Defense):
    """Moves every input by its client's loss on validation data of its own."""

    name = "test-validated"
    place = "data"
    needs = frozenset({"validation"})

    def perturb(self, batch: ClientBatch) -> Inputs:
        assert batch.validation is not None
        return batch.perturbed + batch.validation.loss()[:, None, None]


@declared
class Broken(Defense):
    """Shares NaN."""

    name = "test-broken"

    def protect(self, update: Tree, call: Call) -> Tree:
        return update.map(lambda tensor: tensor * float("nan"))


class Noted(Observer):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def on_start(self, task: Task, settings: object, done: list[object]) -> None:  # type: ignore[override]
        self.calls.append(("start", len(done)))

    def on_round_start(self, number: int, clients: list[int]) -> None:
        self.calls.append(("round", number, clients))

    def on_step(self, number: int, step: int) -> None:
        self.calls.append(("step", number, step))

    def on_round_end(self, record: object) -> None:
        self.calls.append(("end", record.round))  # type: ignore[attr-defined]

    def on_finish(self, run: object) -> None:
        self.calls.append(("finish",))

    def on_stop(self) -> None:
        self.calls.append(("stop",))


def assert_rows_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            tensor, other[name], rtol=tolerance, atol=tolerance, msg=lambda said, n=name: f"{n}: {said}"
        )


def assert_rows_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
