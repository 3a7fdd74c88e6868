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

from fedveil.tree import Tree, matrix

# So many entries of all examples' gradients in one parameter are kept; more are made a few examples at a time.
MOST_KEPT = 2**23
# A product of two matrices of inner products costs less than the gradients themselves if it has at most so many times
# their entries: it stays in the processor's cache, where they are written to memory and read twice.
CHEAPER = 16
FEW_ENTRIES = 2**17  # so few are summed in double precision at once
PATCHES_AT_ONCE = (
    2**17
)  # entries: a larger block the system would clear anew each time, which takes as long as all else


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

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def patches(self, inputs: Tensor) -> Tensor:
        """What the kernel meets at each of its T places, of (N, channels, height, width): (N, groups, T, p).

        Channels come last in a patch: a copy of long rows is several times as fast as torch's own `unfold`.
        """
        count, channels, high, wide = inputs.shape
        above, left = self.padding
        padded = inputs.new_zeros(count, high + 2 * above, wide + 2 * left, channels)
        padded[:, above : above + high, left : left + wide] = inputs.permute(0, 2, 3, 1)
        size, step = padded.shape[1:3], padded.stride()
        places = [
            (length - far * (kernel - 1) - 1) // stride + 1
            for length, far, kernel, stride in zip(size, self.dilation, self.kernel, self.stride, strict=True)
        ]
        met = padded.as_strided(
            (count, *places, *self.kernel, channels),
            (
                step[0],
                *[step[axis + 1] * self.stride[axis] for axis in (0, 1)],
                *[step[axis + 1] * self.dilation[axis] for axis in (0, 1)],
                1,
            ),
        )
        if self.groups == 1:
            return met.reshape(count, 1, math.prod(places), -1)
        apart = met.reshape(*met.shape[:5], self.groups, -1).permute(0, 5, 1, 2, 3, 4, 6)
        return apart.reshape(count, self.groups, math.prod(places), -1)


@dataclass(frozen=True, eq=False)
class Convolved:
    """The weight of a convolution: the gradient is Σₜ gₜ aₜᵀ over the places t of its window, in every group.

    An example may go through it as several inputs, such as the frames of a film.
    """

    taken: Tensor  # (B, n, channels, height, width)
    slope: Tensor  # (B, n, channels, height, width)
    window: Window
    shape: torch.Size  # of the weight

    def squares(self) -> Tensor:
        """See `Share`."""
        size, places = self.taken.shape[0], math.prod(self.slope.shape[3:]) * self.taken.shape[1]
        wide, tall = self.shape[1:].numel(), self.shape[0] // self.window.groups
        if places**2 * (wide + tall) <= CHEAPER * wide * tall:
            taken, slope = self._columns(slice(None))
            inner = [part @ part.mT for part in (taken.double(), slope.double().mT)]
            return (inner[0] * inner[1]).sum((1, 2, 3)).clamp_min(0.0)
        return _squares_in_parts(self, size, self.shape.numel())

    def weighted(self, factors: Tensor) -> Tensor:
        """See `Share`."""
        if "_kept" in self.__dict__:
            return self._as_weight(Rows(self._kept).weighted(factors)[None])[0]
        scaled = (self.slope * factors[:, None, None, None, None]).flatten(0, 1)
        window = self.window
        blank = scaled.new_empty(1).expand(self.shape[0], self.shape[1], *window.kernel)
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            scaled,
            self.taken.flatten(0, 1),
            blank,
            None,
            window.stride,
            window.padding,
            window.dilation,
            False,
            (0, 0),
            window.groups,
            (False, True, False),
        )
        return found[1].reshape(self.shape)

    def each(self) -> Tensor:
        """See `Share`."""
        return self._as_weight(self._kept)

    def part(self, examples: slice) -> Tensor:
        """The gradients of some examples, with the entries of a patch in the order of `Window.patches`."""
        taken, slope = self._columns(examples)
        return slope @ taken

    def _columns(self, examples: slice) -> tuple[Tensor, Tensor]:
        """What the kernel met, and the gradients in what came out: (B, groups, T, p) and (B, groups, d, T)."""
        taken, slope = self.taken[examples], self.slope[examples]
        size, several = taken.shape[:2]
        met = self.window.patches(taken.flatten(0, 1))
        back = slope.reshape(size, several, self.window.groups, -1, slope[0, 0, 0].numel())
        if several == 1:
            return met, back[:, 0]
        return met.reshape(size, several, *met.shape[1:]).movedim(1, 2).flatten(2, 3), back.movedim(1, 3).flatten(3)

    def _as_weight(self, found: Tensor) -> Tensor:
        """Gradients in the shape of the weight, and the entries of a patch in its order."""
        height, width = self.window.kernel
        patches = found.reshape(len(found), self.shape[0], height, width, -1)
        return patches.permute(0, 1, 4, 2, 3).reshape(-1, *self.shape)

    @cached_property
    def _kept(self) -> Tensor:
        size, groups = len(self.taken), self.window.groups
        found = self.slope.new_empty(size, groups, self.shape[0] // groups, self.shape[1:].numel())
        patches = self.slope[0, :, 0].numel() * self.shape[1:].numel() * groups
        step = max(1, PATCHES_AT_ONCE // patches)
        for first in range(0, size, step):
            found[first : first + step] = self.part(slice(first, first + step))
        return found


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
    if rows.numel() <= FEW_ENTRIES:
        lengths: Tensor = torch.linalg.vector_norm(matrix(rows), dim=1, dtype=torch.float64)
        return lengths.square()
    return Tree({"rows": rows}).length().square()


def _squares_in_parts(share: Product | Convolved, size: int, entries: int) -> Tensor:
    """The squared lengths of all gradients, which are kept if they are small and else made a few at a time."""
    if size * entries <= MOST_KEPT:
        return squared_lengths(share._kept)
    step = max(1, MOST_KEPT // entries)
    parts = [squared_lengths(share.part(slice(first, first + step))) for first in range(0, size, step)]
    return torch.cat(parts)
