"""What a grid of audits is going to do: how many stages, how many of them are kept already, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedveil.attacks.base import Attack
from fedveil.auditing.attacking import scenes_by_role
from fedveil.auditing.lineup import stand_in
from fedveil.auditing.roles import Role
from fedveil.auditing.training import run_key
from fedveil.auditing.workshop import Workshop
from fedveil.clients.choose import gradient_seconds
from fedveil.defenses.chain import Chain
from fedveil.federation.prepare import run_seconds
from fedveil.federation.rehearsal import dry_step
from fedveil.federation.steps import Prepared
from fedveil.study.rooms import IndexedStore, result_key

COMMON: tuple[Role, ...] = ("ceiling", "noise-floor")  # who need no defended update: all defenses share them in round 1
EXTREMES = (0.2, 20.0)  # what a calibration may find, as a factor: beyond it, it was disturbed
TRIALS = 4


@dataclass(frozen=True)
class Planned:
    """A training run, or one role of an attack."""

    name: str  # stages of one name are one stage, in whatever audit they are
    seconds: float
    kept: bool


@dataclass
class Estimates:
    """Plans many audits. What was calibrated for a task serves all of its audits."""

    store: IndexedStore
    stages: dict[str, Planned] = field(default_factory=dict)
    results: int = 0
    kept: int = 0  # whole results
    _pace: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, shop: Workshop) -> float:
        """Plan one more audit; returns the estimated seconds of what is still to do for it."""
        key = result_key(shop)
        self.results += 1
        whole = self.store.holds("result", key)
        self.kept += whole
        new = {each.name: each for each in self._planned(shop, key, whole) if each.name not in self.stages}
        self.stages |= new
        return sum(each.seconds for each in new.values() if not each.kept)

    def _planned(self, shop: Workshop, key: str, whole: bool) -> list[Planned]:
        asked = [each for each in self.store.index.asked(key) if self.store.holds(each.stage, each.key)]  # type: ignore[arg-type]
        attacked = sum(each.stage == "attack" for each in asked)
        found, pace = [], self._calibrated(shop)
        for prepared in (shop.plain, shop.defended) if shop.experiment.trains else ():
            run = run_key(prepared)
            slower = pace[1] if prepared.plan.chain.defenses else 1.0
            seconds = pace[0] * slower * run_seconds(shop.task, shop.experiment.federation)
            found.append(Planned(run, seconds, whole or self.store.holds("train", run)))
        for attack in shop.lineup.attacks:
            for name, seconds in _roles(shop, attack, key):
                found.append(Planned(name, pace[0] * seconds, whole or attacked > 0))
                attacked -= 1
        return found

    def _calibrated(self, shop: Workshop) -> tuple[float, float]:
        """How much slower than counted this machine takes a gradient now, and how much slower the defense makes it."""
        plain = self._pace.get(id(shop.task))
        if plain is None:
            plain = self._pace[id(shop.task)] = (_step_seconds(shop.plain), _counted(shop))
        step, counted = plain
        low, high = EXTREMES
        machine = min(max(step / counted, low), high)
        if not shop.experiment.defense:
            return machine, 1.0
        return machine, min(max(_step_seconds(shop.defended) / step, 1.0), high)

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


def _roles(shop: Workshop, attack: Attack, result: str) -> Sequence[tuple[str, float]]:
    """Names and counted seconds of all roles of an attack in all rounds."""
    experiment = shop.experiment
    scene = replace(stand_in(shop.case, experiment, attack), chain=Chain())
    scenes = scenes_by_role(scene, experiment.chain, scene.updates, experiment.audit.attackers)
    found = []
    for number in experiment.audit.rounds if attack.looks_at != "model" else (0,):
        for role, each in scenes.items():
            work = attack.estimate(each)
            common = role in COMMON and number == 1
            where = f"{id(shop.task)}" if common else result
            found.append((f"{where} {attack.name} {role} {number}", work.seconds + work.fit_seconds))
    return found


def _step_seconds(prepared: Prepared) -> float:
    """What a client's step takes: the shortest of a few, as the first pays for set-up and any may be disturbed."""
    found = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        dry_step(prepared)
        found.append(time.perf_counter() - start)
    return min(found)


def _counted(shop: Workshop) -> float:
    """What the same step should take by counting its arithmetic."""
    batch = shop.task.train.batch(shop.task.clients[0][: shop.experiment.federation.batch_size])
    return gradient_seconds(shop.task.model, batch, 1)
