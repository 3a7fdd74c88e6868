"""FedAvg in worker processes: the same run, with defenses that remember, captures and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedveil.errors import FedveilError
from fedveil.federation.history import RoundRecord
from fedveil.federation.observers import Observer
from fedveil.federation.run import Run, federate
from fedveil.federation.settings import FederationSettings
from fedveil.tasks.task import Task
from fedveil.workers import Workers

from .small import Feedback, Noted, Shift, assert_rows_close, assert_rows_equal, small_task

FEDAVG = FederationSettings(protocol="fedavg", rounds=2, batch_size=9, local_epochs=2, record_rounds=(2,))


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


def run(task: Task, defense: object, workers: int | Workers = 1, **given: object) -> Run:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        return federate(task, defense, FEDAVG, backend="loop", workers=workers, **given)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("buffers", ["shared", "local", "recalibrated"])
@pytest.mark.parametrize("defense", [None, "spm", Shift(), Feedback(), "gaussian-noise:sigma=0.1"], ids=str)
def test_the_run_is_the_same(pool: Workers, defense: object, buffers: str) -> None:
    task = small_task(buffers=buffers)
    here, there = run(task, defense), run(task, defense, pool)
    assert_rows_close(here.params, there.params)
    assert_rows_close(here.buffers, there.buffers)
    assert [record.train_loss for record in here.history] == pytest.approx([r.train_loss for r in there.history])
    assert len(here.captured) == len(there.captured) == 4
    for one, other in zip(here.captured, there.captured, strict=True):
        assert_rows_close(one.capture.shared, other.capture.shared)
        assert torch.equal(one.truth.targets, other.truth.targets)


@pytest.mark.compiles
def test_all_processes_load_what_was_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))
    task, settings = small_task(norm=False, sizes=(9, 9, 9, 9)), replace(FEDAVG, record_rounds=())
    runs = []
    for _ in range(2):
        with Workers(2) as workers:
            runs.append(federate(task, None, settings, backend="compiled", workers=workers))
            assert len(list((tmp_path / "packages").glob("*.so"))) == 1
    assert runs[0].backend == "compiled"
    assert_rows_equal(runs[0].params, runs[1].params)
    assert_rows_close(runs[0].params, run(task, None).params)


def test_observers_hear_of_every_step(pool: Workers) -> None:
    noted = Noted()
    run(small_task(), None, pool, observers=[noted])
    # Two chunks of two clients with batches of 9: 2 epochs of 2 batches, and of 3.
    assert sum(call[0] == "step" for call in noted.calls) == FEDAVG.rounds * 2 * (2 + 3)


class StopsAfterOneRound(Observer):
    """Ends the run as a kill would."""

    def on_round_end(self, record: RoundRecord) -> None:
        raise KeyboardInterrupt


def test_a_stopped_run_goes_on(pool: Workers, tmp_path: Path) -> None:
    whole = run(small_task(), Feedback(), pool)
    with pytest.raises(KeyboardInterrupt):
        run(small_task(), Feedback(), pool, folder=tmp_path, observers=[StopsAfterOneRound()])
    resumed = run(small_task(), Feedback(), pool, folder=tmp_path, resume=True)
    assert_rows_equal(resumed.params, whole.params)


def test_an_error_in_a_worker_names_its_client() -> None:
    steep = replace(FEDAVG, lr=1e38)
    with pytest.raises(FedveilError, match="no update could be taken in round 1: the update of client 0 "):
        federate(small_task(), None, steep, backend="loop", workers=2)


def test_what_workers_cannot_do_is_refused_before_they_start() -> None:
    with pytest.raises(FedveilError, match="several worker processes serve FedAvg only"):
        federate(small_task(), None, FederationSettings(rounds=1), workers=2)
    with pytest.raises(FedveilError, match="1 or more, not 0"):
        federate(small_task(), None, FEDAVG, workers=0)
    task = small_task()
    unsendable = Task(task.model, _data(task), clients=2, loss=lambda *given: nn.functional.cross_entropy(*given))
    with pytest.raises(FedveilError, match="worker processes need models, losses and defenses that can be sent"):
        federate(unsendable, None, FEDAVG, workers=2)


def _data(task: Task) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    indices = torch.arange(20)
    return tuple(part.batch(indices) for part in (task.train, task.validation, task.test) if part is not None)  # type: ignore[misc]
