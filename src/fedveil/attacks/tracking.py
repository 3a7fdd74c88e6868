"""What is noted while an attack runs, and how tries are compared."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.attacks.problem import Reconstruction
from fedveil.progress import Report as Progress  # steps over all chunks of victims

__all__ = ["Counter", "Notes", "Progress", "better"]

NOTED = 30  # how often cost and iterates are noted: a multiple of 3, for the marks at 1/3 and 2/3


def better(best: Reconstruction, tried: Reconstruction) -> Reconstruction:
    """Each victim's try with the lower final cost; one that is not finite never wins over one that is."""
    old, new = (cost.masked_fill(~cost.isfinite(), torch.inf) for cost in (best.cost, tried.cost))
    wins = new < old

    def pick(a: Tensor, b: Tensor, axis: int = 0) -> Tensor:
        shape = [1] * a.dim()
        shape[axis] = -1
        return torch.where(wins.reshape(shape), b, a)

    return Reconstruction(
        inputs=pick(best.inputs, tried.inputs),
        labels=pick(best.labels, tried.labels),
        cost=pick(best.cost, tried.cost),
        steps=best.steps,
        costs=pick(best.costs, tried.costs),
        iterates=pick(best.iterates, tried.iterates, axis=1),
        seconds=best.seconds + tried.seconds,
    )


class Notes:
    """Costs and iterates at evenly spaced steps."""

    def __init__(self, steps: int) -> None:
        count = min(NOTED, steps)
        self.steps = sorted({round(steps * (i + 1) / count) for i in range(count)})
        self.costs: list[Tensor] = []
        self.iterates: list[Tensor] = []
        self._wanted = set(self.steps)

    def before(self, step: int, cost: Tensor) -> None:
        """The costs that a step starts from."""
        if step in self._wanted:
            self.costs.append(cost.detach().clone())

    def after(self, step: int, inputs: Tensor) -> None:
        """The inputs that a step ends with."""
        if step in self._wanted:
            self.iterates.append(inputs.detach().clone())


class Counter:
    """Counts steps over chunks and restarts for a progress display."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self) -> None:
        """One step more."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
