"""Updates as rows of numbers: as they are, or a large one hashed into fewer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedveil.streams import Streams
from fedveil.tree import Tree, matrix


@dataclass(frozen=True, eq=False)
class Sketch:
    """How the tensors of an update become one row of numbers.

    A tensor with more entries than bins is hashed: every entry gets a random sign and is added to one of the bins.
    Inner products of two rows are on average those of the updates.
    """

    bins: dict[str, int]  # of each tensor
    signs: dict[str, Tensor]  # (n,) of those that are hashed

    @classmethod
    def of(cls, like: Tree, most: int) -> Self:
        """For updates like this one. They get at most so many numbers together, and one for each tensor at least.

        No tensor has less than another, unless it is smaller.
        """
        sizes = {name: tensor[0].numel() for name, tensor in like.items()}
        bins, room = {}, most
        for place, name in enumerate(sorted(sizes, key=lambda each: sizes[each])):
            bins[name] = min(sizes[name], max(1, room // (len(sizes) - place)))
            room -= bins[name]
        signs = {
            name: 1 - 2.0 * Streams.seeded(0, [0], "sketch", name).chance(0.5, size)[0]
            for name, size in sizes.items()
            if bins[name] < size
        }
        return cls({name: bins[name] for name in sizes}, signs)

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return sum(self.bins.values())

    def rows(self, updates: Tree) -> Tensor:
        """One row for each of K updates, in single precision on the CPU: (K, size). What is not finite counts as 0."""
        parts = []
        for name, bins in self.bins.items():
            entries = torch.nan_to_num(matrix(updates[name]).float().cpu(), nan=0.0, posinf=0.0, neginf=0.0)
            if name in self.signs:
                entries = torch.nn.functional.pad(entries * self.signs[name], (0, -entries.shape[1] % bins))
                entries = entries.reshape(len(entries), -1, bins).sum(1)
            parts.append(entries)
        return torch.cat(parts, 1)

    def means(self, row: Tensor) -> Tensor:
        """A row (size,) with every number replaced by the mean over those of its tensor."""
        parts = torch.split(row, list(self.bins.values()))
        return torch.cat([part.mean().expand_as(part) for part in parts])
