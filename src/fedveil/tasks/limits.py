"""A smaller task of the same kind: fewer examples, in the same proportions of classes and clients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.tasks.examples import Examples
from fedveil.tasks.randomness import generator
from fedveil.tasks.splits import Parts

LEAST_HELD_OUT = 256  # fewer would make results coarse without saving time


def limited(
    parts: Parts, clients: tuple[Tensor, ...] | None, limit: int, seed: int
) -> tuple[Parts, tuple[Tensor, ...] | None]:
    """The parts with at most `limit` training examples, and the clients' indices in them.

    The validation and test parts are reduced in the same proportion, but not below `LEAST_HELD_OUT` examples. If the
    clients' examples are given, so is every client.
    """
    if limit < 1:
        raise FedveilError(f"limit must be at least 1, got {limit}")
    held = torch.arange(len(parts.train)) if clients is None else torch.cat(clients)
    if limit >= len(held):
        return parts, clients
    owners = None
    if clients is not None:
        owners = torch.repeat_interleave(torch.tensor([len(indices) for indices in clients])).numpy()
    chosen = held[_spread(parts.train.labels[held], limit, seed, "train", owners)].sort().values
    share = limit / len(held)
    small = Parts(
        parts.train.subset(chosen),
        None if parts.validation is None else _cut(parts.validation, share, seed, "validation"),
        _cut(parts.test, share, seed, "test"),
    )
    if clients is None:
        return small, None
    return small, tuple(_within(indices, chosen, number, limit) for number, indices in enumerate(clients))


def _cut(part: Examples, share: float, seed: int, what: str) -> Examples:
    count = max(int(np.ceil(share * len(part))), LEAST_HELD_OUT)
    if count >= len(part):
        return part
    return part.subset(_spread(part.labels, count, seed, what).sort().values)


def _spread(labels: Tensor, count: int, seed: int, what: str, owners: np.ndarray | None = None) -> Tensor:
    """Draw `count` indices. Each class of each owner gets its share, rounded up or down."""
    random = generator(seed, "limit", what)
    order = random.permutation(len(labels))
    keys = [labels.numpy()[order]] if labels.dim() == 1 else []
    keys += [] if owners is None else [owners[order]]
    if keys:
        order = order[np.lexsort(keys)]
    # Even steps through the examples sorted by class, from a random start.
    steps = np.floor((np.arange(count) + random.random()) * len(labels) / count).astype(np.int64)
    return torch.from_numpy(order[np.minimum(steps, len(labels) - 1)])


def _within(indices: Tensor, chosen: Tensor, number: int, limit: int) -> Tensor:
    kept = indices[torch.isin(indices, chosen)]
    if not len(kept):
        raise FedveilError(f"limit {limit} leaves client {number} without an example: it has {len(indices)}, use more")
    return torch.searchsorted(chosen, kept)
