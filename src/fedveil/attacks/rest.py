"""When a victim's search is over: its objective, priors and all, stays as it is.

One whose objective goes up and down has not settled, however long nothing lower is found: steps that jump may still
land somewhere better. Each victim is looked at by itself, so that it rests at the same step whatever others do.
"""

from __future__ import annotations

import torch
from torch import Tensor

STILL = 0.003  # an objective stays as it is if it moves by no more than this share of itself


class Rest:
    """Victims of a search in small steps: they rest once the objective stays as it is for `patience` steps.

    It has moved as soon as it is further than STILL from where it was when it last moved, up or down, so that many
    small steps add up. No patience at all: nobody ever rests.
    """

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self._resting: Tensor | None = None  # (V,), once an objective was seen
        self._mark: Tensor  # (V,) where it was when it last moved; these two are set with the first
        self._since: Tensor  # (V,) steps since then

    @property
    def all(self) -> bool:
        """Whether nobody moves any more."""
        return self._resting is not None and bool(self._resting.all())

    def see(self, value: Tensor) -> Tensor:
        """Who rests (V,), given the objectives that the next step starts from."""
        if self._resting is None:
            self._resting = torch.zeros_like(value, dtype=torch.bool)
            self._mark, self._since = value.detach().clone(), torch.zeros_like(value, dtype=torch.int64)
        if self.patience is None:
            return self._resting
        moved = (value - self._mark).abs() > STILL * self._mark.abs()
        self._mark = torch.where(moved, value.detach(), self._mark)
        self._since = torch.where(moved, 0, self._since + 1)
        self._resting = self._resting | (self._since >= self.patience)
        return self._resting

    def wake(self) -> None:
        """Everyone moves again, as at a new rate."""
        self._resting = None


class RestOverSteps:
    """Victims of a search whose steps consist of many: they rest if the objective stays as it is all through
    `patience` steps in a row.
    """

    def __init__(self, patience: int | None, like: Tensor) -> None:
        self.patience = patience
        self.resting = torch.zeros(len(like), dtype=torch.bool, device=like.device)  # (V,)
        self._still = torch.zeros(len(like), dtype=torch.int64, device=like.device)  # steps in a row
        self._low, self._high = (like.new_full((len(like),), end) for end in (torch.inf, -torch.inf))

    @property
    def all(self) -> bool:
        """Whether nobody moves any more."""
        return bool(self.resting.all())

    def see(self, value: Tensor) -> None:
        """Objectives (V,) within a step. To see one twice changes nothing: others may make more of these steps."""
        self._low, self._high = torch.minimum(self._low, value.detach()), torch.maximum(self._high, value.detach())

    def end_step(self) -> None:
        """A step is over."""
        still = self._high - self._low <= STILL * self._high.abs()
        self._still = torch.where(still, self._still + 1, 0)
        if self.patience is not None:
            self.resting = self.resting | (self._still >= self.patience)
        self._low, self._high = torch.full_like(self._low, torch.inf), torch.full_like(self._high, -torch.inf)
