"""Poisson sampling: each example joins a batch by a coin of its own. DP-SGD's ε holds for such batches only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from fedveil.errors import FedveilError
from fedveil.streams import Streams

# A batch this unlikely was not drawn with the planned size: see `beyond_chance`.
HARDLY_EVER = 1e-12


def poisson_sample(count: int, size: int, streams: Streams) -> Tensor:
    """The indices of a batch: each of `count` examples with chance size/count."""
    chance = min(1.0, size / count)
    return (streams.uniform(count, dtype=torch.float64)[0] < chance).nonzero().flatten()


def beyond_chance(size: int, planned: int) -> bool:
    """Whether Poisson sampling hardly ever draws so many examples, however many there are (Bernstein's bound).

    >>> beyond_chance(60, planned=32), beyond_chance(256, planned=32)
    (False, True)
    """
    excess = size - planned
    return excess > 0 and excess**2 / (2 * (planned + excess / 3)) > -math.log(HARDLY_EVER)


class PoissonSampler(Sampler[list[int]]):
    """A batch sampler for a `DataLoader`: batches of random size, `batch_size` of `count` examples on average.

    Coins come from the operating system's entropy unless a `seed` is given: whoever knows the seed knows the batches.
    `steps` batches make an epoch, by default as many as hold all examples on average.
    """

    def __init__(self, count: int, batch_size: int, *, steps: int | None = None, seed: int | None = None) -> None:
        if not 1 <= batch_size <= count:
            raise FedveilError(f"batch_size must be between 1 and the number of examples, {count} (got {batch_size})")
        if steps is not None and steps < 1:
            raise FedveilError(f"steps must be 1 or more (got {steps})")
        self.count, self.batch_size = count, batch_size
        self.steps = steps or math.ceil(count / batch_size)
        self._streams = Streams.secure([0]) if seed is None else Streams.seeded(seed, [0], "poisson")
        self._epoch = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for step in range(self.steps):
            yield poisson_sample(self.count, self.batch_size, self._streams.fold("epoch", epoch, "step", step)).tolist()


def poisson_loader(
    dataset: Dataset[Any], batch_size: int, *, steps: int | None = None, seed: int | None = None, **options: Any
) -> DataLoader[Any]:
    """A `DataLoader` of Poisson batches, for DP-SGD in a training loop of your own; empty batches come too.

    `options` go to the `DataLoader`. An epoch has `steps` batches, by default as many as hold all examples on average.
    """
    taken = {"sampler", "batch_sampler", "shuffle", "drop_last"} & options.keys()
    if taken:
        raise FedveilError(f"poisson_loader draws the batches itself: leave out {', '.join(sorted(taken))}")
    if not isinstance(dataset, Sized):
        raise FedveilError("Poisson sampling needs a data set of known length: this one has no len()")
    sampler = PoissonSampler(len(dataset), batch_size, steps=steps, seed=seed)
    collate = _Collate(dataset, options.pop("collate_fn", None) or default_collate)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **options)


class _Collate:
    """Collates examples into a batch; an empty batch gives tensors of length 0 with the right shapes."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        return self.collate(examples) if examples else _emptied(self.collate([self.dataset[0]]))


def _emptied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {name: _emptied(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_emptied(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
