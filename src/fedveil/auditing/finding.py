"""What one attack shows in one round, by one measure: what a verdict is chosen from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedveil.auditing.result import Row, Status

Reason = Literal["", "few images", "weak attack", "uninformed"]


@dataclass(frozen=True)
class Finding:
    """The strongest attacker beside the undefended ceiling and the better floor."""

    lead: Row
    ceiling: Row
    floor: Row
    measure: str
    status: Status
    why: str
    reason: Reason = ""  # of "not judged"
    images: int = 0  # that would be enough, where there are too few

    @property
    def mean(self) -> float:
        """The share of images that the attacker picks out."""
        return self.lead.metrics[self.measure].mean
