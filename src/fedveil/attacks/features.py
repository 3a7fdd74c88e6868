"""Updates as a network takes them: hashed where they are large, every tensor in a unit of its own, decorrelated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedveil.attacks.principal import Principal
from fedveil.attacks.sketch import Sketch
from fedveil.tree import Tree

FAINT = (
    0.05  # in parts of the mean variance: directions that vary less than this are not blown up to the size of others
)


@dataclass(frozen=True, eq=False)
class Features:
    """A map from updates to rows of numbers of about unit size, linear but for a constant."""

    sketch: Sketch
    center: Tensor  # (d,)
    factor: Tensor  # (d,): of one number for each tensor
    directions: Tensor | None  # (d, k); none: the hashed entries themselves

    @classmethod
    def of(cls, sketch: Sketch, clear: Tensor, seen: Tensor, directions: int) -> Self:
        """Fitted to hashed updates (n, d) without the noise of a defense, and to the same as they are seen.

        directions: at most so many principal directions of the former, in each of which the latter have about unit
        size; 0 for none.
        """
        center = seen.mean(0)
        spread = sketch.means((seen - center).square().mean(0)).sqrt()
        factor = torch.where(spread > 0, 1 / spread, 0.0)
        if not directions:
            return cls(sketch, center, factor, None)
        found = Principal.of((clear - clear.mean(0)) * factor, directions)
        variances = ((seen - center) * factor @ found.directions).square().mean(0)
        sizes = (variances + FAINT * variances.mean()).sqrt().clamp_min(1e-30)
        return cls(sketch, center, factor, found.directions / sizes)

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return len(self.center) if self.directions is None else self.directions.shape[1]

    def __call__(self, updates: Tree) -> Tensor:
        """A row for each of K updates: (K, size)."""
        rows = (self.sketch.rows(updates) - self.center) * self.factor
        return rows if self.directions is None else rows @ self.directions

    def tensors(self) -> dict[str, Tensor]:
        """What was fitted; the sketch follows from the form of the updates."""
        found = {"center": self.center, "factor": self.factor}
        return found if self.directions is None else {**found, "directions": self.directions}

    @classmethod
    def read(cls, sketch: Sketch, tensors: Mapping[str, Tensor]) -> Self:
        """The same again, out of its tensors."""
        return cls(sketch, tensors["center"], tensors["factor"], tensors.get("directions"))
