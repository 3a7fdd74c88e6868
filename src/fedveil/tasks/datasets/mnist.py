"""MNIST (LeCun, Cortes, Burges)."""

from __future__ import annotations

from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.idx_images import IdxImages


@datasets.register("mnist")
@declared
class MNIST(IdxImages):
    """Handwritten digits, gray 28×28, 60,000 + 10,000."""

    class_names = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    mean = 0.1307
    std = 0.3081
