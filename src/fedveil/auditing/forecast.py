"""What an audit is going to do, for those who watch how far it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedveil.attacks.base import Attack
from fedveil.auditing.attacking import scenes_by_role
from fedveil.auditing.lineup import stand_in
from fedveil.auditing.workshop import Workshop
from fedveil.defenses.chain import Chain
from fedveil.federation.observers import Watch
from fedveil.progress import Report, Stage, part_of


def stages_of(shop: Workshop) -> list[Stage]:
    """What an audit does, in order, with what each part takes beside others of its kind.

    A suite may end before it ran all of its attacks: what is told is the most that is to do.
    """
    experiment = shop.experiment
    lines = ["training"] if experiment.trains else []
    if lines and experiment.defense:
        lines = ["training without a defense", f"training under {experiment.chain}"]
    found = [Stage(line, "training", experiment.federation.rounds) for line in lines]
    for each in shop.lineup.attacks:
        seconds = _seconds(shop, each) * len(experiment.audit.rounds)
        found.append(Stage(attack_line(each.name), "attack", seconds))
    return found


def _seconds(shop: Workshop, attack: Attack) -> float:
    """Estimated seconds of an attack in one round: of all its roles, and of what it learns before."""
    scene, chain = stand_in(shop.case, shop.experiment, attack), shop.experiment.chain
    bare = replace(scene, chain=Chain())
    scenes = scenes_by_role(bare, chain, bare.updates, shop.experiment.audit.attackers)
    works = [attack.estimate(each) for each in scenes.values()]
    fits = 2 if "adaptive" in scenes and "defense" in attack.learns_about else 1
    return sum(work.seconds for work in works) + fits * max(work.fit_seconds for work in works)


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
