"""The stages of an audit, and who is told of them."""

from __future__ import annotations

from typing import Any

from fedveil.auditing.asked import Asked
from fedveil.federation.observers import Watch
from fedveil.progress import Report, Stage, part_of


def stages_of(asked: Asked) -> list[Stage]:
    """What an audit does, in order, with what each part takes beside others of its kind."""
    found = training_stages(asked) if asked.train else []
    for each in asked.attacks:
        made = each.choices()
        tries = made.restarts * len(asked.settings.rounds) * (20 if made.optimizer == "lbfgs" else 1)
        found.append(Stage(f"attacking with {each.name}", "attack", made.steps * tries))
    return found


def training_stages(asked: Asked) -> list[Stage]:
    """The run without a defense, and the one under it."""
    lines = ["training"]
    if asked.chain.defenses:
        lines = ["training without a defense", f"training under {asked.chain}"]
    return [Stage(line, "training", asked.federation.rounds) for line in lines]


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
