"""What an attacker who knows the weights that were sent out makes of weights whose signs and sizes were perturbed.

A sign mechanism sends ω·t* with |t*| in [low, high]. So ω lies in an interval that the observed value gives, or in its
mirror image if the sign was flipped. Training moves weights a little, ω = w_t − c: hence w_t tells which of the two,
and where an end of the interval lies close to w_t it cuts off part of what c may be. Small weights have short
intervals: they give their change away at any ε. Taking c as a mix of normals, all of this has closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SPREADS = torch.logspace(-6, 0.5, 14, dtype=torch.float64)  # of the changes, over that of the weights of a tensor
PIECE = 50_000  # entries at a time; the first so many, spread over a tensor, tell how far its weights moved
_FITTING = 40  # steps of expectation maximization
_TINY = 1e-300
_NARROW, _DEEP = 1e-3, -1e3  # limits at which closed forms lose their digits and simpler ones are exact


@dataclass(frozen=True)
class Range:
    """The bounds of |t*|, and how likely a sign is flipped."""

    low: float
    high: float
    flip: float


def likely_change(sent: Tensor, before: Tensor, of: Range) -> tuple[Tensor, Tensor]:
    """The expected change w_t − ω of every entry, and how sure it is: its square over the expected square.

    sent, before: one client's tensor ω·t*, and w_t.
    """
    value, start = sent.double().flatten(), before.double().flatten()
    scale = float(start.square().mean().sqrt()) or float(value.square().mean().sqrt()) or 1.0
    spreads = scale * SPREADS
    change, square = mixed_posterior(lambda part: _posteriors(value[part], start[part], of, spreads), len(value))
    exact = value == 0  # zero stays zero
    change, sure = torch.where(exact, start, change), torch.where(exact, 1.0, change.square() / square.clamp_min(_TINY))
    return change.reshape(sent.shape).to(sent.dtype), sure.clamp(0, 1).reshape(sent.shape).to(sent.dtype)


Posteriors = Callable[[slice], tuple[Tensor, Tensor, Tensor]]


def mixed_posterior(posteriors: Posteriors, length: int) -> tuple[Tensor, Tensor]:
    """The expected value and square of every entry, where the spread is unknown and fitted to what was sent.

    posteriors: for some entries, and one row per spread, the log-likelihood, the expected value and its square.
    """
    shares = _fitted(posteriors(slice(None, None, -(-length // PIECE)))[0])
    parts = [slice(at, at + PIECE) for at in range(0, length, PIECE)]
    pieces = [_mixed(shares, *posteriors(part)) for part in parts]
    value, square = (torch.cat(each) for each in zip(*pieces, strict=True))
    return value, square


def _fitted(log_likelihood: Tensor) -> Tensor:
    """The mix of spreads under which what was sent is likeliest: changes have heavy tails, and many are zero."""
    shares = log_likelihood.new_full((len(log_likelihood),), 1 / len(log_likelihood))
    for _ in range(_FITTING):
        shares = torch.softmax(log_likelihood + shares.clamp_min(_TINY).log()[:, None], 0).mean(1)
    return shares


def _mixed(shares: Tensor, log_likelihood: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """The expected change and its expected square over all spreads."""
    weight = torch.softmax(log_likelihood + shares.clamp_min(_TINY).log()[:, None], 0)
    return (weight * mean).sum(0), (weight * square).sum(0)


def _posteriors(value: Tensor, start: Tensor, of: Range, spreads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For changes from N(0, spread²), one row per spread: log-likelihood, expected change, expected square of it."""
    spreads = spreads.to(value.device)[:, None]
    ends = torch.stack([value / of.low, value / of.high])[:, None]  # of ω if the sign was kept; if not, negative
    kept = cut_normal(*_sorted((start - ends) / spreads))
    flipped = cut_normal(*_sorted((start + ends) / spreads))
    log_kept, log_flipped = kept[0] + math.log1p(-of.flip), flipped[0] + math.log(max(of.flip, _TINY))
    # The factor 1/|ω| of the density is left out: it does not tell the signs apart, and the normal one outweighs it.
    right = torch.sigmoid(log_kept - log_flipped)
    mean = right * kept[1] + (1 - right) * flipped[1]
    square = right * (kept[2] + kept[1].square()) + (1 - right) * (flipped[2] + flipped[1].square())
    log_likelihood = torch.where(value == 0, 0.0, torch.logaddexp(log_kept, log_flipped))
    return log_likelihood, spreads * mean, spreads.square() * square


def _sorted(ends: Tensor) -> tuple[Tensor, Tensor]:
    return ends.amin(0), ends.amax(0)


def cut_normal(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A standard normal variable cut to [low, high]: the log of its mass there, its mean and its variance."""
    mirrored = low + high > 0  # in the lower tail logarithms keep their digits
    a, b = torch.where(mirrored, -high, low), torch.where(mirrored, -low, high)
    log_a, log_b = torch.special.log_ndtr(a), torch.special.log_ndtr(b)
    log_mass = log_b + torch.log1p(-torch.exp(log_a - log_b))
    at_a, at_b = torch.exp(_log_density(a) - log_mass), torch.exp(_log_density(b) - log_mass)
    mean = at_a - at_b
    variance = 1 + a * at_a - b * at_b - mean.square()
    width, middle = b - a, (a + b) / 2
    narrow = width * (1 + middle.abs()) < _NARROW  # the density hardly changes over it
    log_mass = torch.where(narrow, _log_density(middle) + width.clamp_min(_TINY).log(), log_mass)
    deep = ~narrow & (b < _DEEP)  # all of the mass is at the near end
    mean = torch.where(narrow, middle, torch.where(deep, b, mean))
    variance = torch.where(narrow, width.square() / 12, torch.where(deep, 0.0, variance)).clamp(0, 1)
    return log_mass, torch.where(mirrored, -mean, mean), variance


def _log_density(x: Tensor) -> Tensor:
    return -x.square() / 2 - math.log(2 * math.pi) / 2
