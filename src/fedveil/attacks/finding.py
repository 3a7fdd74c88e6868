"""What an attack found: one class for each question that an attack can ask of shared updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Question = Literal["reconstruct", "link"]


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The batch of every victim, rebuilt. The first axis of every tensor is the victim."""

    inputs: Tensor  # (V, B, ...), in the model's input space
    labels: Tensor  # (V, B)
    cost: Tensor  # (V,) final matching cost without priors; NaN of an attack that matches nothing
    seconds: float
    steps: Sequence[int] = ()  # at which the cost and the iterates were noted
    costs: Tensor | None = None  # (V, len(steps))
    iterates: Sequence[Tensor] = ()  # (V, B, ...) at each of these steps: read one at a time, they may lie in a file

    def __post_init__(self) -> None:
        if self.costs is None:
            object.__setattr__(self, "costs", self.inputs.new_zeros(len(self.inputs), 0))


@dataclass(frozen=True, eq=False)
class Links:
    """How well each candidate explains every victim's update. Which one is the original is not in here."""

    scores: Tensor  # (V, N): log-likelihoods, or similarities; the attacker picks the largest
    exact: Tensor  # (V,) whether they are log-likelihoods by the law of the defense
    seconds: float

    def linked(self, place: Tensor) -> Tensor:
        """Whether each victim's original, which stands at `place` (V,), was picked: a tie is no pick. Shape (V,)."""
        scores = torch.nan_to_num(self.scores.double(), nan=-torch.inf)
        own = scores.gather(1, place[:, None])
        others = scores.scatter(1, place[:, None], -torch.inf).amax(1, keepdim=True)
        return (own > others).squeeze(1)


Finding = Reconstruction | Links
