"""What an audit is asked to do: its arguments, read and checked, as they travel together through its stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from fedveil.attacks.base import Attack
from fedveil.auditing.settings import AuditSettings
from fedveil.clients.engine import Backend
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.settings import FederationSettings
from fedveil.fields import field_values
from fedveil.registry import attacks as attack_registry
from fedveil.registry import defenses as defense_registry
from fedveil.tasks.task import Task


@dataclass(frozen=True, eq=False)
class Asked:
    """One audit: what is trained under what, attacked how, and where it is kept."""

    task: Task
    chain: Chain
    attacks: tuple[Attack, ...]
    federation: FederationSettings
    settings: AuditSettings
    seed: int = 0
    backend: Backend = "auto"
    device: str = "cpu"
    train: bool = True
    folder: Path | None = None
    resume: bool = False

    def chain_at(self, number: int) -> Chain:
        """In a warm-up round there is no defense, and an attacker who knows it knows that too."""
        return Chain(()) if number <= self.federation.warmup_rounds else self.chain

    def with_rounds(self, rounds: Sequence[int]) -> Self:
        """The same, attacking other rounds."""
        return replace(self, settings=replace(self.settings, rounds=tuple(rounds)))

    def inside(self, *parts: str) -> Path | None:
        """A place in the audit's folder, if it has one."""
        return None if self.folder is None else self.folder.joinpath(*parts)

    def config(self) -> dict[str, Any]:
        """All of it as plain data, for the record."""
        return {
            "task": self.task.description,
            "defense": [defense_registry.describe(each) for each in self.chain.defenses],
            "attack": [attack_registry.describe(each) for each in self.attacks],
            "federation": {**field_values(self.federation), "train": self.train},
            "audit": field_values(self.settings),
            "seed": self.seed,
            "backend": self.backend,
            "device": self.device,
        }


def read_defense(given: Defense | Chain | Sequence[Defense] | str | None) -> Chain:
    """The chain that is meant; `none` is no defense."""
    return Chain(tuple(defense for defense in Chain.of(given).defenses if defense.name != "none"))


def read_attacks(given: Attack | str | Sequence[Attack | str]) -> tuple[Attack, ...]:
    """The attacks that are meant, each by another name."""
    listed = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    made = [attack_registry.parse(each) if isinstance(each, str) else each for each in listed]
    for each in made:
        if isinstance(each, type) and issubclass(each, Attack):
            raise FedveilError(f"an attack is given as an instance: {each.__name__}(), not {each.__name__}")
        if not isinstance(each, Attack):
            raise FedveilError(f"an attack is a registered name or an instance of an attack's class, not {each!r:.80}")
    names = [each.name for each in made]
    if len(set(names)) < len(names):
        raise FedveilError(f"each attack can be named once in an audit (got {', '.join(names)})")
    return tuple(made)
