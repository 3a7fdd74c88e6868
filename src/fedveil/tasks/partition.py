"""Which client holds which training examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.fields import Count, Positive, declared
from fedveil.registry import Registry
from fedveil.tasks.arrays import are_labels
from fedveil.tasks.randomness import generator

partitions = Registry("partition", "fedveil.partitions", "fedveil.tasks.partition")


class Partition(ABC):
    """A way to divide the training examples among clients. A new one implements `divide`."""

    name: ClassVar[str]

    @abstractmethod
    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        """One int64 tensor of indices per client: disjoint, none empty. `labels` are those of the training part."""

    def assign(self, labels: Tensor, clients: int, seed: int) -> tuple[Tensor, ...]:
        """Check that there are enough examples, then `divide`."""
        if clients < 1:
            raise FedveilError(f"clients must be at least 1, got {clients}")
        if clients > len(labels):
            raise FedveilError(f"{clients} clients cannot share {len(labels)} training examples: use fewer clients")
        return tuple(self.divide(labels, clients, seed))


@partitions.register("iid")
@declared
class IID(Partition):
    """Examples dealt at random; the numbers of examples per client differ by at most one."""

    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        order = torch.from_numpy(generator(seed, "partition").permutation(len(labels)))
        return list(order.tensor_split(clients))


@partitions.register("dirichlet")
@declared
class Dirichlet(Partition):
    """Every class divided by shares drawn from a Dirichlet distribution: the smaller `alpha`, the more uneven.

    Shares that would leave a client with fewer than `least` examples are drawn again, up to a hundred times.
    """

    alpha: Positive = 0.5
    least: Count = 1  # examples of every client

    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        classes = _one_class_each(self.name, labels)
        random = generator(seed, "partition")
        for _ in range(100):
            parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
            for value in np.unique(classes):
                indices = random.permutation(np.flatnonzero(classes == value))
                shares = random.dirichlet(np.full(clients, self.alpha))
                # With a tiny alpha the shares can be NaN: then one client gets the whole class.
                if not np.isfinite(shares).all():
                    shares = np.eye(clients)[random.integers(clients)]
                cuts = np.rint(shares.cumsum()[:-1] * len(indices)).astype(np.int64)
                for part, piece in zip(parts, np.split(indices, cuts), strict=True):
                    part.append(piece)
            found = [random.permutation(np.concatenate(part)) for part in parts]
            if min(map(len, found)) >= self.least:
                return [torch.from_numpy(indices) for indices in found]
        raise FedveilError(
            f"dirichlet: alpha={self.alpha:g} leaves one of {clients} clients with fewer than {self.least} of "
            f"{len(labels)} examples, in a hundred draws: use fewer clients or a larger alpha"
        )


@partitions.register("shards")
@declared
class Shards(Partition):
    """Examples sorted by class, cut into equal shards, and `per_client` shards dealt to each client at random.

    A client has few classes: mostly two, with 2 shards and classes of equal size.
    """

    per_client: Count = 2

    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        classes = _one_class_each(self.name, labels)
        count = clients * self.per_client
        if count > len(classes):
            raise FedveilError(
                f"shards: {clients} clients with {self.per_client} shards each need {count} examples, there are "
                f"{len(classes)}: use fewer clients or a smaller per_client"
            )
        random = generator(seed, "partition")
        mixed = random.permutation(len(classes))
        shards = np.array_split(mixed[np.argsort(classes[mixed], kind="stable")], count)
        dealt = random.permutation(count).reshape(clients, self.per_client)
        return [torch.from_numpy(random.permutation(np.concatenate([shards[i] for i in own]))) for own in dealt]


def _one_class_each(name: str, labels: Tensor) -> np.ndarray:
    if labels.is_floating_point() and not are_labels(labels):
        raise FedveilError(f"{name} divides by class, and the targets here are numbers: use iid")
    if labels.dim() != 1:
        raise FedveilError(f"{name} divides by class, but here an example can have several labels: use iid")
    return labels.numpy()
