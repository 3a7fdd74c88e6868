"""Results to a tracker, where one is asked for: TensorBoard or MLflow."""

from __future__ import annotations

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
    mlflow = import_module("mlflow")

    def track(number: int, values: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(values), step=number)

    return track
