"""An untrained convolutional network as a candidate: its weights are moved, and pictures are what it makes of noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.attacks.candidate import Found, Learned, Variables, held
from fedveil.attacks.optimizers import Descent, Optimizer
from fedveil.errors import FedveilError
from fedveil.streams import Streams

if TYPE_CHECKING:
    from fedveil.attacks.problem import Problem

SMALLEST = 8  # pixels of a side, below which there is nothing to upsample
COARSEST = 4  # pixels of a side of the first grid; its sides double, or nearly so, up to the picture's
NARROWEST = 32  # channels; doubled until there are enough parameters
SPARE = 4  # parameters for each pixel of the batch
CODE = 128  # numbers of the noise behind each picture
SLOPE = 0.1  # of the activation below 0
STEADY = 1e-5  # added to variances
TINY = 1e-30  # keeps a kernel of zeros from dividing by zero
SQUARINGS = 5  # of a Gram matrix, whose 32nd power is nearly that of its largest eigenvalue
# Go along with the weights, and are never moved: the noise, and the middle of the valid range with half its width.
NOISE, MIDDLE, HALF = "fixed.noise", "fixed.middle", "fixed.half"

Grid = tuple[int, int]


@dataclass(frozen=True)
class Plan:
    """The layout of a network: the sides and channels of its grids, from the coarsest to the picture."""

    grids: tuple[Grid, ...]
    channels: tuple[int, ...]  # of each grid
    colors: int  # channels of the picture

    @classmethod
    def of(cls, batch_size: int, shape: tuple[int, ...]) -> Plan:
        """The narrowest for a batch of such pictures that has more than `SPARE` parameters for each pixel of it."""
        if len(shape) != 3 or min(shape[1:]) < SMALLEST:
            raise FedveilError(
                f"an untrained network draws pictures of at least {SMALLEST} × {SMALLEST} pixels, and these inputs "
                f"have the shape {' × '.join(map(str, shape))}"
            )
        colors, *sides = shape
        grids = grids_to((sides[0], sides[1]))
        width = NARROWEST
        while (plan := cls(grids, tuple(_narrowed(width, grid) for grid in grids), colors)).size <= SPARE * (
            batch_size * math.prod(sides)
        ):
            width *= 2
        return plan

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        first = self.channels[0]
        found: dict[str, tuple[int, ...]] = {"first.weight": (CODE, first, *self.grids[0])}
        found |= _norm_shapes("first", first)
        before = first
        for place, channels in enumerate(self.channels):
            for half, entering in (("a", before), ("b", channels)):
                name = f"{place}{half}"
                found[f"{name}.weight"] = (channels, entering, 3, 3)
                found |= _norm_shapes(name, channels)
            before = channels
        return {**found, "last.weight": (self.colors, before, 1, 1), "last.bias": (self.colors,)}

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def operations(self) -> int:
        """Floating-point operations that drawing one picture takes in its 3 × 3 convolutions, which take most."""
        before = (self.channels[0], *self.channels)
        each = zip(self.grids, before, self.channels, strict=False)
        return sum(2 * 9 * (entering + channels) * channels * math.prod(grid) for grid, entering, channels in each)


def grids_to(sides: Grid) -> tuple[Grid, ...]:
    """The grids from at most `COARSEST` pixels a side to the picture's; each has half the sides of the next."""
    found = [sides]
    while max(found[0]) > COARSEST:
        found.insert(0, (-(-found[0][0] // 2), -(-found[0][1] // 2)))
    return tuple(found)


def _narrowed(width: int, grid: Grid) -> int:
    """Fine grids have fewer channels: half as many above 32 pixels, a quarter above 64."""
    longest = max(grid)
    return width if longest <= 32 else width // 2 if longest <= 64 else width // 4


def _norm_shapes(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.scale": (channels,), f"{name}.shift": (channels,)}


@dataclass(frozen=True)
class UntrainedNetwork:
    """One convolutional generator per victim, whose weights are moved.

    It draws the B pictures of a batch from B fixed rows of noise. A dense layer makes the coarsest grid of each; every
    further grid is the nearest-neighbor upsampling of the one before. On each grid there are two 3 × 3 convolutions of
    spectral norm 1, each with batch norm over the batch and LeakyReLU behind it. A 1 × 1 convolution and tanh, scaled
    to the valid range, make the pictures; where the range is not known there is no tanh.

    The width is doubled until there are more than four parameters for each pixel of the batch.
    """

    def start(self, problem: Problem, streams: Streams, found: Found | None = None) -> Variables:
        """Fresh weights and noise; or those that a phase of the same network found."""
        if found is not None:
            if NOISE not in found.variables:
                raise FedveilError("the weights of an untrained network cannot go on from pictures")
            return {name: tensor.detach().clone() for name, tensor in found.variables.items()}
        plan, like = Plan.of(problem.batch_size, problem.shape), problem.like
        made = {}
        for name, shape in plan.shapes.items():
            if name.endswith(".scale"):
                made[name] = like.new_ones(problem.count, *shape)
            elif name.endswith((".shift", ".bias")):
                made[name] = like.new_zeros(problem.count, *shape)
            else:
                made[name] = (streams.uniform(*shape).to(like) * 2 - 1) / math.sqrt(math.prod(shape[1:]))
        made[NOISE] = streams.normal(problem.batch_size, CODE).to(like)
        low, high = problem.box or (like.new_zeros(()), like.new_zeros(()))
        made[MIDDLE] = ((high + low) / 2).to(like).expand(problem.count, *problem.shape).clone()
        if problem.box is not None:
            made[HALF] = ((high - low) / 2).to(like).expand(problem.count, *problem.shape).clone()
        return made

    def decode(self, variables: Variables, learned: Learned) -> Tensor:
        """The pictures that the network draws."""
        middle = held(variables[MIDDLE])
        out = torch.einsum("bn,nchw->bchw", held(variables[NOISE]), variables["first.weight"])
        out = _active(_normed(out, variables, "first"))
        for place, grid in enumerate(grids_to((middle.shape[-2], middle.shape[-1]))):
            if place:
                out = F.interpolate(out, size=grid)
            for half in "ab":
                name = f"{place}{half}"
                out = F.conv2d(out, with_unit_norm(variables[f"{name}.weight"]), padding=1)
                out = _active(_normed(out, variables, name))
        out = F.conv2d(out, variables["last.weight"], variables["last.bias"])
        return middle + (held(variables[HALF]) * torch.tanh(out) if HALF in variables else out)

    def cost(self, variables: Variables) -> Tensor | None:
        """Nothing."""
        return None

    def project(self, variables: Variables, problem: Problem) -> None:
        """Nothing to do: pictures are in the valid range whatever the weights are."""


def with_unit_norm(kernel: Tensor) -> Tensor:
    """The kernel (out, in, h, w) over an upper bound of its spectral norm as a matrix (out, in · h · w).

    The bound is too large by a factor of at most out^(1/128), 4 % for 128 channels. No slope goes through it: the
    batch norm behind is blind to scale.
    """
    return kernel / norm_bound(kernel.detach().flatten(1))


def norm_bound(matrix: Tensor) -> Tensor:
    """An upper bound of a matrix's spectral norm: σ ≤ ‖(MMᵀ)^p‖^(1/2p) in the Frobenius norm, here with p = 32.

    Unlike power iteration it has no start to remember from step to step, and never falls short.
    """
    power: Tensor = matrix @ matrix.T
    log = matrix.new_zeros(())
    for number in range(SQUARINGS):
        size = _size(power)
        log = log + size.log() / 2**number
        power = power / size  # or it would leave single precision
        power = power @ power
    return torch.exp((log + _size(power).log() / 2**SQUARINGS) / 2)


def _size(matrix: Tensor) -> Tensor:
    return matrix.square().sum().sqrt().clamp_min(TINY)


def _normed(grids: Tensor, variables: Variables, name: str) -> Tensor:
    """Batch norm: every channel's mean and variance over the batch and all places."""
    mean = grids.mean((0, 2, 3), keepdim=True)
    apart = grids - mean
    variance = apart.square().mean((0, 2, 3), keepdim=True)
    scale, shift = (variables[f"{name}.{part}"][:, None, None] for part in ("scale", "shift"))
    return apart * (scale * torch.rsqrt(variance + STEADY)) + shift


def _active(grids: Tensor) -> Tensor:
    return F.leaky_relu(grids, SLOPE)


@dataclass(frozen=True)
class Lowest:
    """Another optimizer's way, of which every victim's place with the lowest matching cost is kept, not the last."""

    way: Optimizer

    @property
    def evaluations(self) -> int:
        """Those of the other."""
        return self.way.evaluations

    def minimize(self, start: Variables, steps: int, descent: Descent) -> Variables:
        """The lowest of all places where the cost was asked for. A victim whose cost is never finite stays put."""
        best = {name: tensor.clone() for name, tensor in start.items()}
        least: Tensor | None = None

        def evaluate(at: Variables) -> tuple[Variables, Tensor]:
            nonlocal least
            gradients, cost = descent.evaluate(at)
            wins = cost < (torch.full_like(cost, torch.inf) if least is None else least)
            least = torch.where(wins, cost, torch.inf if least is None else least)
            for name, tensor in best.items():
                tensor[wins] = at[name][wins]
            return gradients, cost

        evaluate(self.way.minimize(start, steps, replace(descent, evaluate=evaluate)))
        return best
