"""What attackers and the judge need, wherever the updates come from."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.attacks.scene import Public, Workbench
from fedveil.auditing.reference_training import ReferenceTraining
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.leakage.modality import Modality


@dataclass(frozen=True, eq=False)
class Case:
    """What an audit's own training and captured updates have in common."""

    name: str  # "digits, mlp": for people
    public: Public
    modality: Modality
    settings: AuditSettings
    store: Store
    bench: Workbench
    seed: int = 0
    training: ReferenceTraining | None = None  # how it is trained, for attackers who do the same on their own data
