"""What an attack found: one class for each question that an attack can ask of shared updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from fedveil.attacks.iterates import Iterates

Question = Literal["reconstruct", "link"]


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The batch of every victim, rebuilt. The first axis of every tensor is the victim."""

    inputs: Tensor  # (V, B, ...), in the model's input space
    labels: Tensor  # (V, B, ...)
    cost: Tensor  # (V,) final matching cost without priors; NaN of an attack that matches nothing
    seconds: float
    steps: Sequence[int] = ()  # at which the cost and the iterates were noted
    costs: Tensor | None = None  # (V, len(steps))
    iterates: Sequence[Tensor] = ()  # (V, B, ...) at each of these steps: read one at a time, they may lie in a file

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The victims of several runs of one attack one after another."""
        costs = [part.costs for part in parts if part.costs is not None]
        return cls(
            inputs=torch.cat([part.inputs for part in parts]),
            labels=torch.cat([part.labels for part in parts]),
            cost=torch.cat([part.cost for part in parts]),
            seconds=sum(part.seconds for part in parts),
            steps=parts[0].steps,
            costs=torch.cat(costs) if costs else None,
            iterates=Iterates.concat([part.iterates for part in parts]),
        )

    def rows(self, index: slice | Tensor) -> Self:
        """Some of the victims; the time is shared out evenly."""
        inputs = self.inputs[index]
        return replace(
            self,
            inputs=inputs,
            labels=self.labels[index],
            cost=self.cost[index],
            seconds=self.seconds * len(inputs) / max(len(self.inputs), 1),
            costs=None if self.costs is None else self.costs[index],
            iterates=self.iterates.rows(index) if isinstance(self.iterates, Iterates) else (),
        )


@dataclass(frozen=True, eq=False)
class Links:
    """How well each candidate explains every victim's update. Which one is the original is not in here."""

    scores: Tensor  # (V, N): log-likelihoods, or similarities; the attacker picks the largest
    exact: Tensor  # (V,) whether they are log-likelihoods by the law of the defense
    seconds: float

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The victims of several runs of one attack one after another."""
        return cls(
            scores=torch.cat([part.scores for part in parts]),
            exact=torch.cat([part.exact for part in parts]),
            seconds=sum(part.seconds for part in parts),
        )

    def linked(self, place: Tensor) -> Tensor:
        """Whether each victim's original, which stands at `place` (V,), was picked: a tie is no pick. Shape (V,)."""
        scores = torch.nan_to_num(self.scores.double(), nan=-torch.inf)
        own = scores.gather(1, place[:, None])
        others = scores.scatter(1, place[:, None], -torch.inf).amax(1, keepdim=True)
        return (own > others).squeeze(1)


Finding = Reconstruction | Links
