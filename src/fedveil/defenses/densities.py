"""Laws of what random mechanisms send: the log densities that `Defense.log_density` is made of.

Everything is summed in double precision over the entries of each row, one tensor at a time. What does not depend on
the candidate may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedveil.tree import Tree, matrix

# What an entry costs, in nats, that a mechanism cannot have sent. Not infinite: an attacker computes a candidate's
# update on another machine, and a last bit must not rule out the right one.
IMPOSSIBLE = 30.0
_ROUNDING = 8  # of the smallest steps between numbers: by how much an entry that is computed again may be off
_TINY = 1e-30


class Pair(NamedTuple):
    """One tensor as it was sent and as it came in, in double precision: a row (K, n) for each candidate."""

    name: str
    sent: Tensor  # (K, n), or (1, n) where all rows have the same
    given: Tensor  # (K, n)
    eps: float  # of the type that was sent

    def blur(self, value: Tensor) -> Tensor:
        """By how much such entries may be off where they are computed again."""
        most = value.abs().amax(1, keepdim=True)
        return (_ROUNDING * self.eps * (value.abs() + most)).clamp_min(_TINY)

    def spike(self, value: Tensor) -> Tensor:
        """The log density of an entry that is sent as `value`, exactly but for rounding."""
        most = torch.maximum(self.sent.abs().amax(1, keepdim=True), value.abs().amax(1, keepdim=True))
        return spike(self.sent - value, self.blur(value), 2 * most)


def summed(observed: Tree, given: Tree, law: Callable[[Pair], Tensor]) -> Tensor:
    """The sum of a law of single entries, which gets whole tensors, over all entries of each row: shape (K,)."""
    total = torch.zeros(given.count, dtype=torch.float64)
    for name, came in given.items():
        sent = observed[name]
        one = sent[:1] if sent.dim() and sent.stride(0) == 0 else sent  # all rows have the same: not copied K times
        pair = Pair(name, matrix(one).double(), matrix(came).double(), torch.finfo(sent.dtype).eps)
        total = total + law(pair).sum(1).cpu()
    return total


def squared_distance(observed: Tree, given: Tree) -> Tensor:
    """The sum of squared differences of each row: shape (K,)."""
    return summed(observed, given, lambda pair: (pair.sent - pair.given).square())


def gaussian(observed: Tree, given: Tree, sigma: float) -> Tensor:
    """What is sent is what came in plus N(0, sigma²) on every entry."""
    return -squared_distance(observed, given) / (2 * sigma**2)


def laplace(observed: Tree, given: Tree, scale: float) -> Tensor:
    """What is sent is what came in plus Laplace(0, scale) on every entry."""
    return -summed(observed, given, lambda pair: (pair.sent - pair.given).abs()) / scale


def log_normal_density(value: Tensor, sigma: Tensor) -> Tensor:
    """The log density of N(0, sigma²), with its constant: for mixtures."""
    return -0.5 * (value / sigma).square() - torch.log(sigma) - 0.5 * math.log(2 * math.pi)


def spike(residual: Tensor, width: Tensor, reach: Tensor) -> Tensor:
    """The log density of a number that is known but for an error of any size from `width` to `reach`.

    All orders of magnitude of the error are about equally likely: 1/(|r| + width), normalized over |r| ≤ reach. An
    exact replay hits the narrow top, and one that is a little off still tells the right candidate from others.
    """
    reach = torch.maximum(reach, width)
    return -torch.log(2 * torch.log1p(reach / width)) - torch.log(residual.abs() + width)


def root_mean_square(values: Tensor) -> Tensor:
    """The spread of every row (K, n) around zero: shape (K, 1)."""
    return values.square().mean(1, keepdim=True).sqrt()


def either(condition: Tensor, yes: float, no: float) -> Tensor:
    """One of two numbers for every entry, in double precision."""
    return torch.where(condition, torch.tensor(yes, dtype=torch.float64), torch.tensor(no, dtype=torch.float64))


def log_odds_of_two(t: Tensor, upper: Tensor, epsilon: float) -> Tensor:
    """Duchi's mechanism: the log chance of the upper or the lower of its two values, for t clamped to [−1, 1]."""
    t, x = t.clamp(-1, 1), math.exp(-epsilon)
    toward = torch.where(upper, t, -t)
    # ½ + t(e^ε−1)/(2(e^ε+1)), in a form that does not cancel where it is small.
    return torch.log((((1 + toward) + x * (1 - toward)) / (2 * (1 + x))).clamp_min(1e-300))
