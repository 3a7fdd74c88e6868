"""CIFAR-10 (Krizhevsky, 2009)."""

from __future__ import annotations

from pathlib import Path

from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.base import DataSet, LoadedData
from fedveil.tasks.datasets.cifar_images import read_batches
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.sources import CIFAR10_BATCHES, find_files


@datasets.register("cifar10")
@declared
class CIFAR10(DataSet):
    """Photographs of animals and vehicles, color 32×32, 50,000 + 10,000.

    Some of the five training batches are enough; `note` then says which.
    """

    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean = (0.4915, 0.4823, 0.4468)
    std = (0.2470, 0.2435, 0.2616)

    def load(self, root: Path | None = None) -> LoadedData:
        """Read the batches from root/cifar-10-batches-py/ or root/cifar10/."""
        found = find_files(self.name, root)
        there = [name for name in CIFAR10_BATCHES if name in found]
        if not there:
            raise FedveilError(
                f"cifar10: none of data_batch_1 to data_batch_5 in {found['test_batch'].parent}: "
                "get them with `fedveil data fetch cifar10`"
            )
        numbers = ", ".join(name.rpartition("_")[2] for name in there)
        return LoadedData(
            name="cifar10",
            train=read_batches([found[name] for name in there], "labels"),
            test=read_batches([found["test_batch"]], "labels"),
            normalization=Normalization(self.mean, self.std),
            class_names=self.class_names,
            note="" if len(there) == len(CIFAR10_BATCHES) else f"training batches {numbers} of 5",
        )
