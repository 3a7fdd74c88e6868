"""Who takes part in a round, and in which order a client walks through its data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from fedveil.streams import Streams

SERVER = -1  # the number whose stream the server draws from


def sampled_clients(seed: int, count: int, rate: float, number: int) -> list[int]:
    """The clients of a round: max(⌈rate·count⌉, 1) of them, in client order."""
    # 0.1 · 30 is 3.0000000000000004 in floating point, and means 3.
    size = max(math.ceil(round(rate * count, 9)), 1)
    if size == count:
        return list(range(count))
    order = Streams.seeded(seed, [SERVER], "round", number, "clients").permutation(count)[0]
    return sorted(order[:size].tolist())


def epoch_orders(seed: int, client: int, number: int, length: int, epochs: int = 1) -> list[Tensor]:
    """The order in which a client visits its `length` examples in every local epoch of a round."""
    streams = Streams.seeded(seed, [client], "round", number, "order")
    return [streams.permutation(length)[0] for _ in range(epochs)]


def batches(order: Tensor, size: int) -> list[Tensor]:
    """The order cut into batches; the last may be smaller."""
    return [order[start : start + size] for start in range(0, len(order), size)]


def windows(clients: Sequence[int], size: int) -> Iterator[list[int]]:
    """The clients a few at a time, in their order."""
    for start in range(0, len(clients), size):
        yield list(clients[start : start + size])
