"""Running an attack on several scenes at once: each in pieces, in this process or shared out among workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Finding, Links, Reconstruction
from fedveil.attacks.notes import Counter
from fedveil.attacks.scene import Scene, Workbench
from fedveil.progress import Report
from fedveil.workers import tick

Name = TypeVar("Name")


def run_on(
    attack: Attack, scenes: Mapping[Name, Scene], fitted: Mapping[Name, Any], bench: Workbench
) -> dict[Name, Finding]:
    """The finding in every scene.

    A scene's finding does not depend on the others: each is attacked in pieces of its own.
    """
    scenes = {name: replace(scene, bench=bench) for name, scene in scenes.items()}
    works = {name: attack.estimate(scene) for name, scene in scenes.items()}
    counter = Counter(bench.report, sum(work.steps for work in works.values()))
    pieces = [(name, piece) for name, scene in scenes.items() for piece in attack.pieces(scene)]
    workers = bench.workers
    if workers is None or len(pieces) == 1 or not workers.worth(lambda: sum(work.seconds for work in works.values())):
        findings = [attack.run(_told(piece, counter), fitted.get(name)) for name, piece in pieces]
    else:
        jobs = [(attack, _alone(piece), fitted.get(name)) for name, piece in pieces]
        findings = list(workers.map(_work, jobs, counter.add))
    names = [name for name, _ in pieces]
    return {name: joined([f for own, f in zip(names, findings, strict=True) if own == name]) for name in scenes}


def joined(findings: list[Finding]) -> Finding:
    """The findings of pieces as one."""
    first = findings[0]
    if len(findings) == 1:
        return first
    if isinstance(first, Links):
        return Links.concat([each for each in findings if isinstance(each, Links)])
    return Reconstruction.concat([each for each in findings if isinstance(each, Reconstruction)])


def _told(scene: Scene, counter: Counter) -> Scene:
    return replace(scene, bench=replace(scene.bench, workers=None, report=each_step(counter.add)))


def _alone(scene: Scene) -> Scene:
    """The scene as it travels to a worker."""
    return replace(scene, bench=replace(scene.bench, workers=None, report=None))


def _work(job: tuple[Attack, Scene, Any]) -> Finding:
    attack, scene, fitted = job
    return attack.run(replace(scene, bench=replace(scene.bench, report=each_step(tick))), fitted)


def each_step(call: Callable[[], None]) -> Report:
    """A report that calls once for every step, however many steps it is told of at a time."""
    seen = 0

    def report(done: int, total: int) -> None:
        nonlocal seen
        for _ in range(done - seen):
            call()
        seen = max(seen, done)

    return report
