"""What a grid of audits is going to do: how many stages, how many of them are kept already, and how long it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from fedveil.attacks.base import Attack
from fedveil.attacks.scene import Scene
from fedveil.auditing.attacking import scenes_by_role
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.lineup import stand_in
from fedveil.auditing.roles import Role
from fedveil.auditing.training import run_key
from fedveil.auditing.workshop import Workshop
from fedveil.clients.choose import pace
from fedveil.defenses.chain import Chain
from fedveil.federation.prepare import run_seconds, sample_of
from fedveil.study.rooms import IndexedStore, Rooms, name_result, named_result, result_key
from fedveil.workers import Workers

COMMON: tuple[Role, ...] = ("ceiling", "noise-floor")  # who need no defended update: all defenses share them in round 1
EXTREMES = (0.2, 20.0)  # what a calibration may find, as a factor: beyond it, it was disturbed


@dataclass(frozen=True)
class Planned:
    """A training run, or one role of an attack."""

    name: str  # stages of one name are one stage, in whatever audit they are
    seconds: float
    kept: bool


@dataclass
class Estimates:
    """Plans many audits: those that are kept by their names alone, others opened once for all of their seeds."""

    store: IndexedStore
    stages: dict[str, Planned] = field(default_factory=dict)
    results: int = 0
    kept: int = 0  # whole results
    kinds: set[str] = field(default_factory=set)  # of data, of the audits that were opened
    _rooms: Rooms = field(init=False)
    _pace: dict[int, float] = field(default_factory=dict)
    _counted: dict[Hashable, float] = field(default_factory=dict)
    _opened: dict[str, list[Planned]] = field(default_factory=dict)  # by the settings without the seed

    def __post_init__(self) -> None:
        self._rooms = Rooms(self.store, Workers(1), sketched=True)

    def add(self, experiment: Experiment) -> float:
        """Plan one more audit; returns the estimated seconds of what is still to do for it.

        What is wrong with it is told here, but for what another seed alone would change.
        """
        key = named_result(self.store, experiment)
        whole = key is not None and self.store.holds("result", key)
        if not whole and (alike := _seedless(experiment)) in self._opened:
            planned = [replace(each, name=f"{each.name} {experiment.seed}") for each in self._opened[alike]]
        elif whole:
            planned = [Planned(f"{each.stage} {each.key}", 0.0, True) for each in self.store.index.asked(str(key))]
        else:
            shop = self._rooms.open(experiment)
            self.kinds.add(shop.modality.name)
            key = result_key(shop)
            whole = self.store.holds("result", key)
            if whole:  # else its key may be another: what a forecast opens has not trained its judges
                name_result(self.store, experiment, key)
            planned = self._planned(shop, key, whole)
            self._opened[_seedless(experiment)] = [replace(each, kept=False) for each in planned]
        self.results += 1
        self.kept += whole
        new = {each.name: each for each in planned if each.name not in self.stages}
        self.stages |= new
        return sum(each.seconds for each in new.values() if not each.kept)

    def _planned(self, shop: Workshop, key: str, whole: bool) -> list[Planned]:
        asked = [each for each in self.store.index.asked(key) if self.store.holds(each.stage, each.key)]  # type: ignore[arg-type]
        attacked = sum(each.stage == "attack" for each in asked)
        found, machine = [], self._pace_of(shop)
        # A defense is tried on two examples: how many passes it asks for tells how much slower it trains.
        slower = max((shop.defended.passes or 1) / (shop.plain.passes or 1), 1.0)
        training = self._once(("training", id(shop.task)), lambda: run_seconds(shop.task, shop.experiment.federation))
        for prepared in (shop.plain, shop.defended) if shop.experiment.trains else ():
            run = run_key(shop, prepared)
            seconds = machine * training * (slower if prepared.plan.chain.defenses else 1.0)
            found.append(Planned(f"train {run}", seconds, whole or self.store.holds("train", run)))
        for attack in shop.lineup.attacks:
            for name, seconds in self._roles(shop, attack, key):
                found.append(Planned(name, machine * seconds, whole or attacked > 0))
                attacked -= 1
        return found

    def _pace_of(self, shop: Workshop) -> float:
        """How many times as long as counted this machine takes now."""
        name = id(shop.task)
        if name not in self._pace:
            sample = sample_of(shop.task, shop.experiment.federation, shop.plain.device)
            low, high = EXTREMES
            self._pace[name] = min(max(pace(shop.plain.engine, sample), low), high)
        return self._pace[name]

    def _roles(self, shop: Workshop, attack: Attack, result: str) -> Sequence[tuple[str, float]]:
        """Names and counted seconds of all roles of an attack in all rounds."""
        experiment = shop.experiment
        scene = replace(stand_in(shop.case, experiment, attack), chain=Chain())
        scenes = scenes_by_role(scene, experiment.chain, scene.updates, experiment.audit.attackers)
        found = []
        for number in experiment.audit.rounds if attack.looks_at != "model" else (0,):
            for role, each in scenes.items():
                form = (id(shop.task), attack, str(each.chain), experiment.audit)
                seconds = self._once(form, lambda each=each: _work_seconds(attack, each))  # type: ignore[misc]
                common = role in COMMON and number == 1
                where = f"{id(shop.task)}" if common else result
                found.append((f"{where} {attack.name} {role} {number}", seconds))
        return found

    def _once(self, name: Hashable, count: Callable[[], float]) -> float:
        """What was counted for the same before, since counting runs the model."""
        if name not in self._counted:
            self._counted[name] = count()
        return self._counted[name]

    @property
    def seconds(self) -> float:
        """Estimated seconds of all that is not kept."""
        return sum(each.seconds for each in self.stages.values() if not each.kept)

    @property
    def told(self) -> str:
        """The plan in a line."""
        kept = sum(each.kept for each in self.stages.values())
        done = f"{self.kept} of {self.results} audits done" if self.kept else f"{self.results} audits"
        stages = f"at most {len(self.stages)} stages (training runs, attacks by each attacker), {kept} of them kept"
        return f"{done}: {stages}; about {duration(self.seconds)} to go"


def duration(seconds: float) -> str:
    """A time that is to be expected, in words.

    >>> duration(0.2), duration(50), duration(400), duration(9000)
    ('a second', '50 seconds', '7 minutes', '2.5 hours')
    """
    if seconds < 1.5:
        return "a second"
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def _work_seconds(attack: Attack, scene: Scene) -> float:
    work = attack.estimate(scene)
    return work.seconds + work.fit_seconds


def _seedless(experiment: Experiment) -> str:
    return json.dumps({**experiment.described(), "seed": 0}, default=str, sort_keys=True)
