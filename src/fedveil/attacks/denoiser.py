"""A law of gradients that noise can be taken off by: Gaussian to begin with, and what a network adds to that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.attacks.diffusion import Diffusion
from fedveil.attacks.networks import Weights, dense, through
from fedveil.attacks.principal import Principal
from fedveil.streams import Streams

WAVES = 16  # of unlike length, by whose sines and cosines a network is told the step
GATING = 128  # width of the layer that tells what kind of gradient a row is
_NETWORK = "network."


@dataclass(frozen=True, eq=False)
class Denoiser:
    """Gradients along their principal directions, in units of their mean spread there, and a network that knows steps.

    The best linear estimate of a row x without noise, given it at step t, is √ᾱ·v/(ᾱ·v + 1 − ᾱ)·x for a direction of
    variance v. The network adds to that, in units of what the linear estimate leaves open. Along all other directions
    gradients have one small variance, and the linear estimate is taken.
    """

    principal: Principal
    unit: float  # the root of the mean variance along the principal directions
    diffusion: Diffusion
    weights: Weights  # empty: the linear estimate alone

    @property
    def variances(self) -> Tensor:
        """Along the principal directions, in these units: (k,)."""
        return self.principal.variances / self.unit**2

    def drawn(self, width: int, streams: Streams) -> Weights:
        """Weights to start from, at which the network adds nothing."""
        size = len(self.principal.variances)
        return {
            **dense("first", size, width, streams),
            **dense("told", size, GATING, streams),
            **dense("step", 2 * WAVES, GATING, streams),
            **dense("gate", GATING, width, streams),
            **dense("last", width, size, streams, gain=0.0),
        }

    def clear(self, weights: Weights, rows: Tensor, steps: Tensor) -> Tensor:
        """An estimate of rows without noise, given these (n, k) at steps (n,)."""
        kept = self.diffusion.kept[steps][:, None].to(rows)
        own = self.variances
        seen = kept * own + 1 - kept
        linear = kept.sqrt() * own / seen * rows
        if not weights:
            return linear
        even = rows / seen.sqrt()
        told = F.gelu(through(weights, "told", rows) + through(weights, "step", waves(steps, self.diffusion.steps)))
        hidden = through(weights, "first", even) * (1 + through(weights, "gate", told))
        return linear + (own * (1 - kept) / seen).sqrt() * through(weights, "last", hidden)

    def error(self, weights: Weights, rows: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        """The mean squared error of the noise that an estimate implies: what diffusion models are trained by."""
        kept = self.diffusion.kept[steps][:, None].to(rows)
        off = self.clear(weights, self.diffusion.forward(rows, steps, noise), steps) - rows
        return (kept / (1 - kept) * off.square()).mean()

    def denoised(self, rows: Tensor, sigma: float, streams: Streams | None = None) -> tuple[Tensor, int]:
        """Gradients (n, d) without noise of spread sigma on every entry, as far as can be told, and the start step.

        streams: one for each row, for a draw in place of the mean.
        """
        start = self.diffusion.start(sigma / self.unit)
        if start == 0:
            return rows, 0
        at = self.principal.coordinates(rows)
        rest = self.principal.remainder(rows, at)
        begun = float(self.diffusion.kept[start]) ** 0.5 * at / self.unit

        def denoise(x: Tensor, step: int) -> Tensor:
            return self.clear(self.weights, x, torch.full((len(x),), step))

        noise = None if streams is None else lambda step: streams.normal(at.shape[1])
        back = self.unit * self.diffusion.back(begun, start, denoise, noise)
        share = self.principal.rest / (self.principal.rest + sigma**2)
        return self.principal.center + back @ self.principal.directions.T + share * rest, start

    def tensors(self) -> dict[str, Tensor]:
        """What was learned."""
        own = self.principal
        return {
            "center": own.center,
            "directions": own.directions,
            "variances": own.variances,
            "rest": torch.tensor(own.rest, dtype=torch.float64),
            **{_NETWORK + name: tensor for name, tensor in self.weights.items()},
        }

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], diffusion: Diffusion) -> Self:
        """The same again, out of its tensors."""
        known = tensors["center"], tensors["directions"], tensors["variances"]
        principal = Principal(*known, rest=float(tensors["rest"]))
        weights = {name.removeprefix(_NETWORK): t for name, t in tensors.items() if name.startswith(_NETWORK)}
        return cls(principal, unit_of(principal), diffusion, weights)


def unit_of(principal: Principal) -> float:
    """The root of the mean variance along principal directions."""
    return max(math.sqrt(float(principal.variances.double().mean())), 1e-30)


def waves(steps: Tensor, total: int) -> Tensor:
    """Steps (n,) as sines and cosines of unlike wave lengths: (n, 2·WAVES)."""
    rates = torch.exp(-math.log(total) * torch.arange(WAVES) / (WAVES - 1)) * math.pi
    angles = steps[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)
