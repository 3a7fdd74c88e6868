"""Evaluation: the same by one process and by several, and for models that write to their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedveil.federation import evaluate, prepare
from fedveil.federation.evaluate import Evaluator, Found, Part
from fedveil.federation.evaluate_workers import SharedOut, _dealt
from fedveil.federation.observers import Observer
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.tasks.task import Task
from fedveil.workers import Workers

FEATURES, CLASSES, COUNT = 4, 3, 700
FEDAVG = FederationSettings(protocol="fedavg", rounds=2, batch_size=50)


def task_of(kind: str, model: nn.Module | None = None) -> Task:
    """A task with several batches to be judged, the last of them a small one."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(COUNT, FEATURES, generator=generator)
    targets = {
        "classes": (inputs[:, 0] > 0) + torch.randint(0, 2, (COUNT,), generator=generator),
        "labels": (inputs[:, :CLASSES] > 0.5).float(),
        "numbers": inputs @ torch.tensor([[1.0], [2.0], [0.0], [-1.0]]),
    }[kind]
    outputs = 1 if kind == "numbers" else CLASSES
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own = model or nn.Linear(FEATURES, outputs)
    parts = (inputs, targets), (inputs[:300] + 0.1, targets[:300]), (inputs[:600] - 0.1, targets[:600])
    return Task(own, parts, clients=2)


def weights(task: Task) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in task.model.named_parameters()}


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])
def test_processes_find_what_one_process_finds(kind: str, pool: Workers, one_thread: None) -> None:
    task = task_of(kind)
    here = Evaluator(task)
    there = Evaluator(task, elsewhere=SharedOut(pool, pool.lodge(task), compiled=False))
    params = weights(task)
    for factor in (1.0, 2.0):
        moved = {name: factor * tensor for name, tensor in params.items()}
        assert there.utility(moved, {}) == here.utility(moved, {})
        assert there.test_value(moved, {}) == here.test_value(moved, {})
        values = here.values(moved, {})
        assert values is not None
        assert len(values) == 600
        assert torch.equal(there.values(moved, {}), values)  # type: ignore[arg-type]


def test_every_share_is_put_back_in_its_place(one_thread: None) -> None:
    """With more and with fewer processes than batches."""
    task = task_of("numbers")
    here, params = Evaluator(task), weights(task_of("numbers"))

    def shared(count: int) -> Evaluator:
        def elsewhere(
            parts: tuple[Part, ...], params: dict[str, Tensor], buffers: dict[str, Tensor]
        ) -> list[list[Found]]:
            shares = [here.batches(parts, params, buffers, first, count) for first in range(count)]
            return [_dealt([share[number] for share in shares]) for number in range(len(parts))]

        return Evaluator(task, elsewhere=elsewhere)

    for count in (1, 2, 3, 5):
        assert torch.equal(shared(count).values(params, {}), here.values(params, {}))  # type: ignore[arg-type]


def test_a_run_is_judged_by_the_processes_that_train(pool: Workers, one_thread: None) -> None:
    task = task_of("classes")
    here = federate(task, None, FEDAVG, backend="loop")
    there = federate(task, None, FEDAVG, backend="loop", workers=pool)
    assert here.untrained == there.untrained
    assert [record.utility for record in here.history] == [record.utility for record in there.history]
    assert torch.equal(here.values, there.values)  # type: ignore[arg-type]


class Writes(nn.Linear):
    """Writes to its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.mul_(-1))


def test_a_model_that_writes_to_its_inputs_sees_the_data_every_time() -> None:
    task = task_of("classes", Writes(FEATURES, CLASSES))
    evaluator, params = Evaluator(task), weights(task)
    once = evaluator.utility(params, {})
    assert evaluator.utility(params, {}) == once == Evaluator(task).utility(params, {})


def test_what_does_not_fit_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("classes")
    params, whole = weights(task), Evaluator(task)
    monkeypatch.setattr(evaluate, "READY_BYTES", 5000)  # a whole batch and the rest of 44
    tight = Evaluator(task)
    for _ in range(2):
        assert tight.utility(params, {}) == whole.utility(params, {})
    assert (len(tight._ready), len(whole._ready)) == (2, 3 + 2 + 3)


@pytest.mark.compiles
def test_compiled_code_is_made_before_the_first_round_and_gives_what_the_model_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))
    monkeypatch.setattr(prepare, "EVALUATION_COMPILED_FROM", 0.0)
    task = task_of("numbers")
    made: list[int] = []

    def counted(*_: object) -> None:
        made.append(len(list((tmp_path / "packages").glob("*.so"))))

    class Counts(Observer):
        on_start = counted

    with Workers(2) as workers:
        there = federate(task, None, FEDAVG, backend="compiled", workers=workers, observers=[Counts()])
    here = federate(task, None, FEDAVG, backend="loop")
    assert made == [2]  # gradients and evaluation
    assert there.utility.test == pytest.approx(here.utility.test, rel=1e-5)
    torch.testing.assert_close(there.values, here.values, rtol=1e-4, atol=1e-5)
