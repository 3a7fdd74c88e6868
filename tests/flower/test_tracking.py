"""Results of rounds in TensorBoard and MLflow, read back by these libraries themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.flower import Server, ServerSettings
from fedveil.flower.tracking import trackers
from flower.exchange import small_model
from flower.grids import FakeGrid
from flower.test_server import client


def two_rounds(folder: Path, tracker: str) -> None:
    settings = ServerSettings(rounds=2, minimum=1, wait=1.0, track=(tracker,))  # type: ignore[arg-type]
    server = Server(settings, folder=folder)
    told = {1: {"test accuracy": 0.25}, 2: {"test accuracy": 0.75}}
    server.start(FakeGrid({0: client(0.5)}), small_model().state_dict(), evaluate=lambda number, _: told[number])


def test_tensorboard_reads_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_rounds(tmp_path, "tensorboard")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    found = {name: [(each.step, each.value) for each in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert found["test accuracy"] == [(1, 0.25), (2, 0.75)]
    assert found["taken"] == [(1, 1.0), (2, 1.0)]
    assert {"seconds", "train-loss"} <= found.keys()


@pytest.mark.deployment  # it starts no server, but CI should have MLflow itself read what was written
def test_mlflow_reads_every_round_and_calls_nobody(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    program = f"""
import sys
looked_up = []
sys.addaudithook(lambda event, given: looked_up.append(given[0]) if event == "socket.getaddrinfo" else None)
from pathlib import Path
from fedveil.flower.tracking import trackers
(track,) = trackers(["mlflow"], Path({str(tmp_path)!r}))
track(1, {{"test accuracy": 0.25}})
track(2, {{"test accuracy": 0.75, "seconds": 3.0}})
import mlflow
run = mlflow.active_run().info.run_id
found = mlflow.MlflowClient().get_metric_history(run, "test accuracy")
print([(each.step, each.value) for each in found])
mlflow.end_run()
import time; time.sleep(3)
print(looked_up)
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == ["[(1, 0.25), (2, 0.75)]", "[]"], done.stderr
    assert (tmp_path / "mlflow.db").exists()


def test_tensorboard_needs_a_folder() -> None:
    pytest.importorskip("tensorboard")
    from fedveil.errors import FedveilError

    with pytest.raises(FedveilError, match="needs a folder"):
        trackers(["tensorboard"], None)
