"""The span that the rows of a noisy gradient lie in, and how far vectors are from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

ROUNDING = 4.0  # single-precision gradients carry a few times the error of one number
LOW = 0.2  # the share of the singular values that is taken for noise
NOISE_FACTOR = 1.05  # the largest singular value of noise alone strays a little above its limit
CLEAN = 100.0  # times the error of rounding: above it there is noise
FILLS = 50  # rounds in which entries that were not sent are filled in
SHRINKING = 0.8  # of what is taken off the singular values, from round to round


@dataclass(frozen=True, eq=False)
class Span:
    """Directions in which a gradient is more than noise. A direction that is little more counts in part."""

    directions: Tensor  # (r, n): orthonormal rows, in double precision
    share: Tensor  # (r,): how much of each direction is signal, by its singular value
    noise: float  # standard deviation of an entry
    clean: bool = True  # whether that is no more than rounding
    largest: float = 0.0  # singular value

    @property
    def rank(self) -> int:
        """Directions above the noise."""
        return len(self.directions)

    @classmethod
    def of(cls, rows: Tensor, weight: Tensor | None = None, *, least: float = 0.0) -> Self:
        """The span of a gradient (m, n) whose noise is estimated from its own singular values.

        The rank comes from that noise. The lowest fifth of the singular values belongs to it as long as there are
        fewer tokens than four fifths of the columns, and says how large it is; rounding is the least noise there is.

        weight: trust in each entry; those with less than half of the most are filled in from the others.
        least: singular values below are left out, whatever the noise is.
        """
        matrix = rows.double()
        if weight is not None:
            there = weight > weight.max() / 2
            matrix = matrix if bool(there.all()) else filled(matrix, there)
        _, values, directions = torch.linalg.svd(matrix, full_matrices=False)
        small, large = min(matrix.shape), max(matrix.shape)
        rounding = ROUNDING * torch.finfo(rows.dtype).eps * float(values[0]) / math.sqrt(small * large)
        measured = _low(values) / _low_of_noise(small, large)
        noise = max(measured, rounding)
        edge = max(NOISE_FACTOR * noise * (math.sqrt(large) + math.sqrt(small)), least)
        rank = int((values > edge).sum())
        signal = (values[:rank].square() - noise**2 * large).clamp_min(0)
        share = signal / (signal + noise**2 * large).clamp_min(1e-300)
        return cls(directions[:rank], share, noise, measured < CLEAN * rounding, float(values[0]))

    def outside(self, vectors: Tensor) -> Tensor:
        """How much of each vector (..., n) lies outside, between 0 and 1: squared lengths compared.

        In the vectors' own precision: single precision tells a vector of the span from others by about 1e-6.
        """
        directions, share = self.directions.to(vectors), self.share.to(vectors)
        inside = ((vectors @ directions.T).square() * share).sum(-1)
        return (1 - inside / vectors.square().sum(-1).clamp_min(1e-30)).clamp(0, 1)


def filled(matrix: Tensor, there: Tensor) -> Tensor:
    """A matrix of low rank with the entries that are not there filled in, so that it stays of low rank.

    Soft imputation (Mazumder et al., 2010): each round shrinks the singular values and lets what is left say what is
    missing; entries that are there stay. The shrinking gets less from round to round.
    """
    known = torch.where(there, matrix, 0.0)
    made = known
    least = torch.finfo(torch.float32).eps
    shrink = 0.5 * float(torch.linalg.matrix_norm(known, 2))
    for _ in range(FILLS):
        squares, directions = torch.linalg.eigh(made.T @ made)
        values = squares.clamp_min(0).sqrt()
        kept = (values - shrink).clamp_min(0) / values.clamp_min(1e-300)
        made = torch.where(there, known, (made @ directions * kept) @ directions.T)
        shrink = max(SHRINKING * shrink, least * float(values[-1]))
    return made


def _low(values: Tensor) -> float:
    """The singular value below which a fifth of them lies."""
    return float(values.sort().values[int(LOW * (len(values) - 1))])


@cache
def _low_of_noise(small: int, large: int) -> float:
    """The same of a matrix of these sides that is noise of deviation 1 (Marchenko and Pastur)."""
    ratio = small / large
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    grid = torch.linspace(low, high, 4001, dtype=torch.float64)[1:-1]
    density = ((high - grid) * (grid - low)).clamp_min(0).sqrt() / grid
    total = density.cumsum(0)
    return math.sqrt(float(grid[int((total >= total[-1] * LOW).nonzero()[0])]) * large)
