"""The stages of an audit, and who is told of them."""

from __future__ import annotations

from typing import Any

from fedveil.attacks.base import Attack
from fedveil.auditing.settings import Audit
from fedveil.defenses.chain import Chain
from fedveil.federation.observers import Watch
from fedveil.federation.settings import Federation
from fedveil.progress import Report, Stage, part_of


def stages_of(chain: Chain, chosen: list[Attack], federation: Federation, settings: Audit, train: bool) -> list[Stage]:
    """What an audit does, in order, with what each part takes beside others of its kind."""
    found = []
    if train:
        bare = "training without a defense" if chain.defenses else "training"
        found.append(Stage(bare, "training", federation.rounds))
        if chain.defenses:
            found.append(Stage(f"training under {chain}", "training", federation.rounds))
    for each in chosen:
        made = each.choices()
        tries = made.restarts * len(settings.rounds) * (20 if made.optimizer == "lbfgs" else 1)
        found.append(Stage(f"attacking with {each.name}", "attack", made.steps * tries))
    return found


def both(given: Watch | None, shown: Watch) -> Watch:
    """Tell the caller's own watch and the meter."""
    if given is None:
        return shown

    def each(name: str) -> Any:
        told = [hook for hook in (getattr(given, name), getattr(shown, name)) if hook is not None]
        return lambda *words: [hook(*words) for hook in told]

    return Watch((*given.observers, *shown.observers), each("plan"), each("stage"), each("attack"))


def round_of(report: Report | None, place: int, count: int) -> Report | None:
    """The progress of one attacked round as a part of all."""
    return part_of(report, place / count, (place + 1) / count) if report else None
