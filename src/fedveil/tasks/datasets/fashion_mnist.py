"""Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017)."""

from __future__ import annotations

from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.idx_images import IdxImages


@datasets.register("fashion-mnist")
@declared
class FashionMNIST(IdxImages):
    """Pictures of clothes, gray 28×28, 60,000 + 10,000."""

    class_names = (
        "t-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    )
    mean = 0.2860
    std = 0.3530
