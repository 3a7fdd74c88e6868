"""Adam for several searches at once that are drawn to what they agree on (group consistency of GradInversion)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.attacks.candidate import Variables
from fedveil.attacks.consensus import Consensus, consensus
from fedveil.attacks.optimizers import Descent
from fedveil.tree import Tree, per_client

INPUTS = "inputs"
REFRESHED = 10  # steps after which it is asked anew what the searches agree on


@dataclass(frozen=True)
class Together:
    """Adam on `seeds` searches for every victim, each from a start of its own.

    The rows of its variables are those of the victims' searches: the first victim's, then the second's. From the first
    quarter of the steps on, `pull` times the mean squared distance to the consensus of a victim's searches is added to
    the objective of each of them. What they agree on is found anew every few steps; in between it stands still.

    Our reading: the pull fades with the rate. A search that comes to explain the update by itself has a small slope
    left, over which a steady pull would win: on single digits that costs 2 dB.
    """

    evaluations: ClassVar[int] = 1
    seeds: int = 4
    lr: float = 0.1
    pull: float = 0.01  # weight of the squared distance to the consensus
    alone: float = 0.25  # share of the steps that the searches go alone first
    noise: float = 0.2  # normal noise that is added to every step, in parts of the rate
    warmup: int = 20  # steps over which the rate rises to `lr`; it falls to zero as a cosine does

    def minimize(self, start: Variables, steps: int, descent: Descent) -> Variables:
        """Project after every step. A search whose gradient is no longer finite rests where it is."""
        variables = dict(start)
        optimizer = torch.optim.Adam(list(variables.values()), lr=self.lr)
        streams = descent.streams
        agreed: Tensor | None = None
        for step in range(steps):
            gradients, cost = descent.evaluate(variables)
            descent.before(cost)
            broken = ~Tree(gradients).isfinite()
            if self.pull and self.seeds > 1 and step >= self.alone * steps:
                if agreed is None or step % REFRESHED == 0:
                    agreed = self.agreed(variables, cost, descent).for_each().flatten(0, 1)
                away = variables[INPUTS] - agreed
                pull = self.pull * cooled(step, steps)
                gradients[INPUTS] = gradients[INPUTS] + (2 * pull / away[0].numel()) * away
            before = {name: variable[broken] for name, variable in variables.items()} if broken.any() else {}
            for name, variable in variables.items():
                gradient = gradients[name]
                variable.grad = gradient.masked_fill(per_client(broken, gradient), 0.0) if before else gradient
            rate = self.rate(step, steps)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            if self.noise and streams is not None:
                inputs = variables[INPUTS]
                drawn = streams.normal(self.seeds, *inputs.shape[1:]).flatten(0, 1).to(inputs)
                inputs.add_(drawn, alpha=self.noise * rate)
            for name, old in before.items():
                variables[name][broken] = old
            descent.project(variables)
            descent.after(variables)
        return variables

    def rate(self, step: int, steps: int) -> float:
        """The rate of a step: it rises first, and falls to zero."""
        rising = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return self.lr * rising * cooled(step, steps)

    def agreed(self, variables: Variables, cost: Tensor, descent: Descent) -> Consensus:
        """What the searches of every victim agree on. The one of the lowest cost leads."""
        pictures, costs = self._apart(variables[INPUTS]), self._apart(cost)
        return consensus(pictures, leading(costs), descent.labels, costs.isfinite())

    def settled(self, variables: Variables, cost: Tensor, descent: Descent) -> tuple[Variables, Tensor]:
        """One row for each victim, and its cost: of its searches and their consensus what matches best."""
        found = self.agreed(variables, cost, descent)
        # Whatever has one entry per picture, such as labels that are optimized, is averaged in the same order.
        means = {name: found.in_order(self._apart(tensor)).mean(1) for name, tensor in variables.items()}
        means[INPUTS] = found.mean
        everywhere = {name: mean.repeat_interleave(self.seeds, 0) for name, mean in means.items()}
        with_mean = torch.cat([self._apart(cost), self._apart(descent.evaluate(everywhere)[1])[:, :1]], 1)
        best = leading(with_mean)
        victims = torch.arange(len(best), device=best.device)
        rows = {}
        for name, tensor in variables.items():
            rows[name] = torch.cat([self._apart(tensor), means[name].unsqueeze(1)], 1)[victims, best]
        return rows, with_mean[victims, best]

    def _apart(self, rows: Tensor) -> Tensor:
        return rows.reshape(-1, self.seeds, *rows.shape[1:])


def cooled(step: int, steps: int) -> float:
    """Falls from 1 to 0 over the steps as a cosine does."""
    return (1 + math.cos(math.pi * step / steps)) / 2


def leading(costs: Tensor) -> Tensor:
    """The search of the lowest cost (V,), of costs (V, S); one that is not finite leads only where all are so."""
    return costs.masked_fill(~costs.isfinite(), torch.inf).argmin(1)
