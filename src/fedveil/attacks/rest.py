"""When a victim's search is over: its cost has stopped falling."""

from __future__ import annotations

import torch
from torch import Tensor

FALLS = 0.01  # a cost still falls if it loses this share of itself within the patience


class Rest:
    """Which victims rest: those whose cost has stopped falling, each looked at by itself.

    A cost falls as long as, within `patience` steps, it gets below 1 − FALLS of the last cost that was such a fall. No
    patience at all: nobody ever rests.
    """

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.resting: Tensor | None = None  # (V,), once a cost was seen
        self._mark: Tensor  # (V,) the last cost that was a fall; these two are set with the first cost
        self._since: Tensor  # (V,) steps since then

    @property
    def all(self) -> bool:
        """Whether nobody moves any more."""
        return self.resting is not None and bool(self.resting.all())

    def see(self, cost: Tensor) -> Tensor:
        """Who rests (V,), given the costs that the next step starts from."""
        if self.resting is None:
            self.resting = torch.zeros_like(cost, dtype=torch.bool)
            self._mark, self._since = cost.detach().clone(), torch.zeros_like(cost, dtype=torch.int64)
        if self.patience is None:
            return self.resting
        falls = cost < (1 - FALLS) * self._mark
        self._mark = torch.where(falls, cost.detach(), self._mark)
        self._since = torch.where(falls, 0, self._since + 1)
        self.resting = self.resting | (self._since >= self.patience)
        return self.resting

    def wake(self) -> None:
        """Everyone moves again, as at a new rate."""
        self.resting = None
