"""What is true of the attacked updates. Only scoring sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Truths:
    """What V victims really had, B examples each, and what to tell it from. Inputs are as the model takes them."""

    originals: Tensor  # (V, B, ...)
    labels: Tensor  # (V, B)
    seen: Tensor  # (V, B, ...): what the gradient was taken at, with whatever a data defense did to it
    rounds: tuple[int, ...]  # V: the attacked round of each victim
    mean_input: Tensor | None = None  # (...): what an attacker can hand in without any update
    distractors: Tensor | None = None  # (V·B, M, ...): held-out examples to tell each original from
    place: Tensor | None = None  # (V,): where the original stands among the candidates of a link test

    @property
    def groups(self) -> list[int]:
        """The victim of every example: examples of one batch depend on each other."""
        victims, size = self.originals.shape[:2]
        return torch.arange(victims).repeat_interleave(size).tolist()
