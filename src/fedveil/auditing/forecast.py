"""What an audit is going to do, for those who watch how far it is."""

from __future__ import annotations

from typing import Any

from fedveil.attacks.matching import GradientMatching
from fedveil.auditing.experiment import Experiment
from fedveil.federation.observers import Watch
from fedveil.progress import Report, Stage, part_of


def stages_of(experiment: Experiment) -> list[Stage]:
    """What an audit does, in order, with what each part takes beside others of its kind."""
    lines = ["training"] if experiment.trains else []
    if lines and experiment.defense:
        lines = ["training without a defense", f"training under {experiment.chain}"]
    found = [Stage(line, "training", experiment.federation.rounds) for line in lines]
    for each in experiment.attacks:
        # Only attacks of one kind can be held against each other; the others take seconds.
        work = each.recipe().evaluations if isinstance(each, GradientMatching) else 0
        found.append(Stage(attack_line(each.name), "attack", work * len(experiment.audit.rounds)))
    return found


def attack_line(name: str) -> str:
    """How the stage of an attack is announced."""
    return f"attacking with {name}"


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
