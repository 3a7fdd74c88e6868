"""Results to a tracker, where one is asked for: TensorBoard or MLflow. Both write into the run's folder.

MLflow's own settings come first: with MLFLOW_TRACKING_URI, results go there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from fedveil.errors import FedveilError

Track = Callable[[int, Mapping[str, float]], None]


def trackers(names: Iterable[str], folder: Path | None) -> list[Track]:
    """A function for each tracker, that is told the numbers of every round."""
    makers = {"tensorboard": _tensorboard, "mlflow": _mlflow}
    return [makers[name](folder) for name in names]


def _tensorboard(folder: Path | None) -> Track:
    if find_spec("tensorboard") is None:
        raise FedveilError("TensorBoard is not installed: pip install tensorboard, or leave it out of track")
    if folder is None:
        raise FedveilError("TensorBoard needs a folder to write to: give the server one")
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def track(number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    return track


def _mlflow(folder: Path | None) -> Track:
    if find_spec("mlflow") is None:
        raise FedveilError("MLflow is not installed: pip install mlflow, or leave it out of track")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would call home
    mlflow = import_module("mlflow")
    if folder is not None and not mlflow.is_tracking_uri_set():
        mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').absolute()}")
    run = (mlflow.active_run() or mlflow.start_run()).info.run_id  # MLflow ends it with the process

    def track(number: int, values: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(values), step=number, run_id=run)

    return track
