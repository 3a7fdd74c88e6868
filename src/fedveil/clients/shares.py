"""What each example of a batch adds to the gradient of a parameter, by the operation that uses the parameter.

A `Share` knows the gradient of every example in one parameter without a backward pass of its own for each: from what
went into the operation and the gradient that came back to its output. It gives three things: their lengths, their
weighted sum, and, where it must, all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedveil.tree import Tree, matrix

# So many entries of all examples' gradients in one parameter are kept; more are made a few examples at a time.
MOST_KEPT = 2**23
# A product of two matrices of inner products costs less than the gradients themselves if it has at most so many times
# their entries: it stays in the processor's cache, where they are written to memory and read twice.
CHEAPER = 16


class Share(Protocol):
    """The gradients of B examples in one parameter."""

    def squares(self) -> Tensor:
        """The squared length of each, never below the true one by more than rounding in double precision: (B,)."""

    def weighted(self, factors: Tensor) -> Tensor:
        """Their sum, each times its factor: shaped as the parameter."""

    def each(self) -> Tensor:
        """All of them: (B, ...)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Gradients that are known one by one, for small parameters such as a bias."""

    rows: Tensor  # (B, ...)

    def squares(self) -> Tensor:
        """See `Share`."""
        return squared_lengths(self.rows)

    def weighted(self, factors: Tensor) -> Tensor:
        """See `Share`."""
        return torch.mv(matrix(self.rows).T, factors).reshape(self.rows.shape[1:])

    def each(self) -> Tensor:
        """See `Share`."""
        return self.rows


@dataclass(frozen=True, eq=False)
class Product:
    """A weight that is multiplied with T rows of each example: the gradient is Σₜ gₜ aₜᵀ."""

    taken: Tensor  # a: what the weight was multiplied with, (B, T, p)
    slope: Tensor  # g: the gradient in what came out, (B, T, d)
    flipped: bool = False  # the parameter has the shape (p, d), not (d, p)

    def squares(self) -> Tensor:
        """See `Share`."""
        times, wide, tall = self.taken.shape[1], self.taken.shape[2], self.slope.shape[2]
        if times == 1:
            return squared_lengths(self.taken) * squared_lengths(self.slope)
        if times**2 * (wide + tall) <= CHEAPER * wide * tall:
            # In double precision, since what cancels in the gradient does so here in a difference of large numbers.
            inner = [part.double() @ part.double().mT for part in (self.taken, self.slope)]
            return (inner[0] * inner[1]).sum((1, 2)).clamp_min(0.0)
        return _squares_in_parts(self, self.taken.shape[0], wide * tall)

    def weighted(self, factors: Tensor) -> Tensor:
        """See `Share`."""
        if "_kept" in self.__dict__:
            return Rows(self._kept).weighted(factors)
        scaled = (self.slope * factors[:, None, None]).flatten(0, 1)
        found = scaled.T @ self.taken.flatten(0, 1)
        return found.T if self.flipped else found

    def each(self) -> Tensor:
        """See `Share`."""
        return self._kept

    def part(self, examples: slice) -> Tensor:
        """The gradients of some examples."""
        found = self.slope[examples].mT @ self.taken[examples]
        return found.mT if self.flipped else found

    @cached_property
    def _kept(self) -> Tensor:
        return self.part(slice(None))


@dataclass(frozen=True)
class Window:
    """How a convolution in one or two dimensions moves over its input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def patches(self, inputs: Tensor) -> Tensor:
        """What the kernel meets at each of its T places: (N, p, T)."""
        planes = inputs.unsqueeze(2) if len(self.kernel) == 1 else inputs
        kernel, dilation, padding, stride = map(
            self._planar, (self.kernel, self.dilation, self.padding, self.stride), (1, 1, 0, 1)
        )
        return functional.unfold(planes, kernel, dilation, padding, stride)

    def _planar(self, numbers: tuple[int, ...], missing: int) -> tuple[int, ...]:
        return (missing, *numbers) if len(numbers) == 1 else numbers


@dataclass(frozen=True, eq=False)
class Convolved:
    """The weight of a convolution: the gradient is Σₜ gₜ aₜᵀ over the places t of its window, in every group.

    An example may go through it as several inputs, such as the frames of a film.
    """

    taken: Tensor  # (B, n, channels, ...)
    slope: Tensor  # (B, n, channels, ...)
    window: Window
    shape: torch.Size  # of the weight

    def squares(self) -> Tensor:
        """See `Share`."""
        size, places = self.taken.shape[0], math.prod(self.slope.shape[3:]) * self.taken.shape[1]
        wide, tall = self.shape[1:].numel(), self.shape[0] // self.window.groups
        if places**2 * (wide + tall) <= CHEAPER * wide * tall:
            taken, slope = self._columns(slice(None))
            inner = [part.double().mT @ part.double() for part in (taken, slope)]
            return (inner[0] * inner[1]).sum((1, 2, 3)).clamp_min(0.0)
        return _squares_in_parts(self, size, self.shape.numel())

    def weighted(self, factors: Tensor) -> Tensor:
        """See `Share`."""
        if "_kept" in self.__dict__:
            return Rows(self._kept).weighted(factors)
        scaled = (self.slope * factors.reshape(-1, *[1] * (self.slope.dim() - 1))).flatten(0, 1)
        window, weight = self.window, self.slope.new_empty(1).expand(self.shape)
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            scaled,
            self.taken.flatten(0, 1),
            weight,
            None,
            window.stride,
            window.padding,
            window.dilation,
            False,
            [0] * len(window.stride),
            window.groups,
            [False, True, False],
        )
        return found[1]

    def each(self) -> Tensor:
        """See `Share`."""
        return self._kept

    def part(self, examples: slice) -> Tensor:
        """The gradients of some examples."""
        taken, slope = self._columns(examples)
        return (slope @ taken.mT).reshape(len(taken), *self.shape)

    def _columns(self, examples: slice) -> tuple[Tensor, Tensor]:
        """What the kernel met, and the gradients in what came out: (B, groups, p, T) and (B, groups, d, T)."""
        taken, slope = self.taken[examples], self.slope[examples]
        size, several = taken.shape[:2]
        met = self.window.patches(taken.flatten(0, 1))
        back = slope.flatten(0, 1).flatten(2)
        parts = [part.unflatten(0, (size, several)).unflatten(2, (self.window.groups, -1)) for part in (met, back)]
        if several == 1:
            return parts[0][:, 0], parts[1][:, 0]
        met, back = (part.movedim(1, 3).flatten(3) for part in parts)
        return met, back

    @cached_property
    def _kept(self) -> Tensor:
        return self.part(slice(None))


@dataclass(frozen=True, eq=False)
class Looked:
    """A table of rows that are looked up, as word embeddings are."""

    numbers: Tensor  # of the rows, (B, T)
    slope: Tensor  # (B, T, d)
    rows: int  # of the table
    padding: int  # a row that gets no gradient; -1: none

    def squares(self) -> Tensor:
        """See `Share`."""
        slope = self._unpadded().double()
        same = self.numbers[:, :, None] == self.numbers[:, None, :]
        return ((slope @ slope.mT) * same).sum((1, 2)).clamp_min(0.0)

    def weighted(self, factors: Tensor) -> Tensor:
        """See `Share`."""
        scaled = (self.slope * factors[:, None, None]).flatten(0, 1)
        found: Tensor = torch.ops.aten.embedding_dense_backward(
            scaled, self.numbers.flatten(), self.rows, self.padding, False
        )
        return found

    def each(self) -> Tensor:
        """See `Share`."""
        size, _, width = self.slope.shape
        table = self.slope.new_zeros(size, self.rows, width)
        return table.scatter_add_(1, self.numbers[:, :, None].expand_as(self.slope), self._unpadded())

    def _unpadded(self) -> Tensor:
        return self.slope * (self.numbers != self.padding)[:, :, None]


@dataclass(frozen=True, eq=False)
class Several:
    """A parameter that is used more than once, such as tied weights: an example's parts add up."""

    shares: Sequence[Share]

    def squares(self) -> Tensor:
        """See `Share`."""
        return squared_lengths(self._sum)

    def weighted(self, factors: Tensor) -> Tensor:
        """See `Share`."""
        return Rows(self._sum).weighted(factors)

    def each(self) -> Tensor:
        """See `Share`."""
        return self._sum

    @cached_property
    def _sum(self) -> Tensor:
        total = self.shares[0].each()
        for share in self.shares[1:]:
            total = total + share.each()
        return total


def squared_lengths(rows: Tensor) -> Tensor:
    """The squared length of each row, in double precision and rounded up."""
    return Tree({"rows": rows}).length().square()


def _squares_in_parts(share: Product | Convolved, size: int, entries: int) -> Tensor:
    """The squared lengths of all gradients, which are kept if they are small and else made a few at a time."""
    if size * entries <= MOST_KEPT:
        return squared_lengths(share.each())
    step = max(1, MOST_KEPT // entries)
    parts = [squared_lengths(share.part(slice(first, first + step))) for first in range(0, size, step)]
    return torch.cat(parts)
