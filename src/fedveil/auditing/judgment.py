"""What one question comes to in one round, by one measure: what a verdict is chosen from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedveil.auditing.result import Question, Row, Status
from fedveil.auditing.settings import AuditSettings
from fedveil.leakage.modality import Modality

Reason = Literal["", "few examples", "weak attack", "no ceiling", "uninformed"]


@dataclass(frozen=True)
class Terms:
    """What the judge goes by beside the rows."""

    settings: AuditSettings
    modality: Modality
    candidates: int  # from which the right one is picked
    config: Mapping[str, Any] = field(default_factory=dict)  # of the audit, to name the command that settles a question
    uninformed: tuple[str, ...] = ()  # defenses that do not say what an attacker who knows them would do

    def counted(self, question: Question) -> str:
        """What the rows of a question have one value each for."""
        return {"reconstruct": self.modality.words.many, "link": "updates", "member": "members"}[question]

    def per_update(self, question: Question) -> int:
        """Values behind one update."""
        return 1 if question == "link" else self.settings.batch_size


@dataclass(frozen=True)
class Judgment:
    """The strongest attacker beside the undefended ceiling and the better floor."""

    question: Question
    lead: Row
    ceiling: Row | None  # None where no undefended update is at hand
    floor: Row
    measure: str
    status: Status
    why: str
    reason: Reason = ""  # of "not judged"
    needed: int = 0  # examples that would be enough, where there are too few

    @property
    def mean(self) -> float:
        """The share of examples that the attacker picks out."""
        return self.lead.metrics[self.measure].mean
