"""What is noted while an attack runs, and how tries are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.iterates import Iterates
from fedveil.progress import Report

NOTED = 30  # how often cost and iterates are noted: a multiple of 3, for the marks at 1/3 and 2/3


def better(best: Reconstruction, tried: Reconstruction) -> Reconstruction:
    """Each victim's try with the lower final cost; one that is not finite never wins over one that is.

    The iterates of `best` are written over: it is not to be used any more.
    """
    old, new = (cost.masked_fill(~cost.isfinite(), torch.inf) for cost in (best.cost, tried.cost))
    return taken(best, tried, new < old)


def taken(best: Reconstruction, tried: Reconstruction, wins: Tensor) -> Reconstruction:
    """`best` with the victims of `tried` in place of its own where these win (V,). It is not to be used any more."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(wins.reshape(-1, *[1] * (a.dim() - 1)), b, a)

    assert isinstance(best.iterates, Iterates)
    assert best.costs is not None
    assert tried.costs is not None
    # Attacks of unlike length are noted at unlike steps: what counts is how far each was.
    here, there = len(best.iterates), len(tried.iterates)
    marks = [max(-(-(mark + 1) * there // here) - 1, 0) for mark in range(here)]
    best.iterates.take(wins, tried.iterates if here == there else [tried.iterates[mark] for mark in marks])
    return replace(
        best,
        inputs=pick(best.inputs, tried.inputs),
        labels=pick(best.labels, tried.labels),
        cost=pick(best.cost, tried.cost),
        costs=pick(best.costs, tried.costs[:, marks]),
        seconds=best.seconds + tried.seconds,
    )


class Notes:
    """Costs and iterates of one try at evenly spaced steps."""

    def __init__(self, steps: int, shape: Sequence[int], scratch: Path | None) -> None:
        count = min(NOTED, steps)
        self.steps = sorted({round(steps * (i + 1) / count) for i in range(count)})
        self.costs: list[Tensor] = []
        self.iterates = Iterates.empty(len(self.steps), shape, scratch)
        self._wanted = {step: place for place, step in enumerate(self.steps)}
        self._step = 0

    def before(self, cost: Tensor) -> None:
        """The costs that the next step starts from."""
        self._step += 1
        if self._step in self._wanted:
            self.costs.append(cost.detach().clone())

    @property
    def wanted(self) -> bool:
        """Whether the inputs after this step are to be noted."""
        return self._step in self._wanted

    def after(self, inputs: Tensor) -> None:
        """The inputs that this step ends with, if they are wanted."""
        self.iterates.put(self._wanted[self._step], inputs)

    def last(self, inputs: Tensor) -> None:
        """What is handed in, in place of the last iterate: a phase may be taken back, or projected at its end."""
        self.iterates.put(len(self.steps) - 1, inputs)

    def arrange(self, order: Tensor) -> None:
        """Put the examples of every iterate in another order (V, B)."""
        rows, order = torch.arange(len(order))[:, None], order.cpu()
        for step, inputs in enumerate(self.iterates):
            self.iterates.put(step, inputs[rows, order])


class Counter:
    """Counts steps over chunks and tries for a progress display."""

    def __init__(self, report: Report | None, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0

    def add(self) -> None:
        """One step more."""
        self._done += 1
        if self._report is not None:
            self._report(self._done, self._total)
