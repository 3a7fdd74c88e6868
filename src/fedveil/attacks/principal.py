"""Principal directions of rows of numbers: where they differ from each other, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_SMALLEST = 1e-7  # of the largest variance: what is below is rounding


@dataclass(frozen=True, eq=False)
class Principal:
    """The directions along which rows vary most, the largest variance first."""

    center: Tensor  # (d,)
    directions: Tensor  # (d, k), orthonormal
    variances: Tensor  # (k,) of the rows along these
    rest: float  # the variance of an entry along what is left: the same in all of its directions

    @classmethod
    def of(cls, rows: Tensor, most: int) -> Self:
        """At most so many directions of rows (n, d), by an eigendecomposition of n × n numbers."""
        count, size = rows.shape
        center = rows.mean(0)
        centered = rows - center
        values, vectors = torch.linalg.eigh((centered @ centered.T).double())
        values, vectors = values.flip(0).clamp_min(0.0), vectors.flip(1)
        room = min(most, size, max(count - 1, 1))
        kept = max(1, int((values[:room] > _SMALLEST * values[0]).sum()))
        lengths = values[:kept].sqrt().clamp_min(1e-30)
        directions = centered.T @ (vectors[:, :kept] / lengths).to(rows)
        # A row that was learned from lies nearer to its own directions than others do: n of them tell less of the rest.
        free = max(size - kept, 1)
        rest = float(values[kept:].sum()) / max(count - 1, 1) / free
        return cls(center, directions, (values[:kept] / max(count - 1, 1)).to(rows), rest)

    def coordinates(self, rows: Tensor) -> Tensor:
        """Of rows (n, d) along the directions: (n, k)."""
        return (rows - self.center) @ self.directions

    def remainder(self, rows: Tensor, coordinates: Tensor) -> Tensor:
        """What of rows (n, d) is not along the directions: (n, d)."""
        return rows - self.center - coordinates @ self.directions.T
