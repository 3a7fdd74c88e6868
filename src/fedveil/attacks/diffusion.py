"""Diffusion (DDPM, Ho et al. 2020): rows of numbers with ever more noise on them, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Denoise = Callable[[Tensor, int], Tensor]  # (rows at a step (n, d), the step) -> an estimate of the rows without noise


@dataclass(frozen=True)
class Diffusion:
    """Steps t = 1, ..., T, each of which shrinks a row a little and adds a little noise.

    At step t a row x is √ᾱ·x + √(1 − ᾱ)·noise, ᾱ the product of 1 − β over the steps up to t. Step 0 is the row itself.
    """

    steps: int = 1000  # T
    first: float = 1e-4  # β at the first step
    last: float = 0.02  # β at the last; linear between

    @cached_property
    def betas(self) -> Tensor:
        """β of every step; 0 at step 0: (T + 1,), in double precision."""
        return torch.nn.functional.pad(torch.linspace(self.first, self.last, self.steps, dtype=torch.float64), (1, 0))

    @cached_property
    def kept(self) -> Tensor:
        """ᾱ at every step: the share of a row's variance that is its own. (T + 1,)."""
        return torch.cumprod(1 - self.betas, 0)

    @cached_property
    def levels(self) -> Tensor:
        """The noise at every step, in parts of the row as it has been shrunk: √((1 − ᾱ)/ᾱ). (T + 1,), rising."""
        return ((1 - self.kept) / self.kept).sqrt()

    def forward(self, rows: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        """Rows (n, d) at steps (n,), given standard normal noise (n, d)."""
        kept = self.kept[steps][:, None]
        return kept.sqrt().to(rows) * rows + (1 - kept).sqrt().to(rows) * noise

    def start(self, level: float) -> int:
        """The first step with at least as much noise: where the way back begins for a row with noise of this level.

        0 if there is none; the last step if there is more than any step has.
        """
        found = int(torch.searchsorted(self.levels, torch.tensor(max(level, 0.0), dtype=torch.float64)))
        return min(found, self.steps)

    def back(self, rows: Tensor, start: int, denoise: Denoise, noise: Callable[[int], Tensor] | None = None) -> Tensor:
        """Rows (n, d) as they are at step `start`, taken back to step 0: each step goes on from the one before.

        noise: fresh noise for a step, as published. The outcome is then one draw of what the rows may have been. Else
        every step takes its mean, and the chain comes to the mean of such draws, exactly so for Gaussian rows.
        """
        for step in range(start, 0, -1):
            beta, kept, before = (float(each) for each in (self.betas[step], self.kept[step], self.kept[step - 1]))
            clear = denoise(rows, step)
            rows = before**0.5 * beta / (1 - kept) * clear + (1 - beta) ** 0.5 * (1 - before) / (1 - kept) * rows
            if noise is not None and step > 1:
                rows = rows + (beta * (1 - before) / (1 - kept)) ** 0.5 * noise(step)
        return rows
