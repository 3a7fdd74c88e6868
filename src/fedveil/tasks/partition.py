"""Which client holds which training examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import Registry
from fedveil.tasks.randomness import generator

partitions = Registry("partition", "fedveil.partitions", "fedveil.tasks.partition")


class Partition(ABC):
    """A way to divide the training examples among clients. A new one implements `divide`."""

    name: ClassVar[str]

    @abstractmethod
    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        """One int64 tensor of places per client: disjoint, none empty. `labels` are those of the training part."""

    def assign(self, labels: Tensor, clients: int, seed: int) -> tuple[Tensor, ...]:
        """`divide` after checking that every client can have an example."""
        if clients < 1:
            raise FedveilError(f"clients must be at least 1, got {clients}")
        if clients > len(labels):
            raise FedveilError(f"{clients} clients cannot share {len(labels)} training examples: use fewer clients")
        return tuple(self.divide(labels, clients, seed))


@partitions.register("iid")
@declared
class IID(Partition):
    """Examples dealt out at random; the clients' numbers of examples differ by at most one."""

    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        order = torch.from_numpy(generator(seed, "partition").permutation(len(labels)))
        return list(order.tensor_split(clients))
