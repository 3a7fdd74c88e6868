"""CIFAR-100 (Krizhevsky, 2009)."""

from __future__ import annotations

from pathlib import Path

from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.base import DataSet, LoadedData
from fedveil.tasks.datasets.cifar_images import read_batches
from fedveil.tasks.datasets.statistics import statistics
from fedveil.tasks.formats.cifar_pickle import read_cifar_pickle
from fedveil.tasks.sources import find_files


@datasets.register("cifar100")
@declared
class CIFAR100(DataSet):
    """Photographs of a hundred kinds of things (the fine classes), color 32×32, 50,000 + 10,000."""

    def load(self, root: Path | None = None) -> LoadedData:
        """Read train, test and meta from root/cifar-100-python/ or root/cifar100/."""
        found = find_files(self.name, root)
        train = read_batches([found["train"]], "fine_labels")
        return LoadedData(
            name="cifar100",
            train=train,
            test=read_batches([found["test"]], "fine_labels"),
            normalization=statistics(train, found["train"]),
            class_names=_names(found["meta"]),
        )


def _names(path: Path) -> tuple[str, ...]:
    names = read_cifar_pickle(path).get("fine_label_names")
    if not isinstance(names, list) or len(names) != 100:
        raise FedveilError(f"{path}: does not hold the names of 100 classes; get it again")
    return tuple(name.decode("latin1") if isinstance(name, bytes) else str(name) for name in names)
