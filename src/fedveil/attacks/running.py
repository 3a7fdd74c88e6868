"""Running an attack on several scenes at once: each in pieces, in this process or shared out among workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Finding, Links, Membership, Reconstruction
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
    return dict(run_each(attack, scenes, fitted, bench))


def run_each(
    attack: Attack, scenes: Mapping[Name, Scene], fitted: Mapping[Name, Any], bench: Workbench
) -> Iterator[tuple[Name, Finding]]:
    """The same scene by scene, each as soon as its last piece is done."""
    scenes = {name: replace(scene, bench=bench) for name, scene in scenes.items()}
    works = {name: attack.estimate(scene) for name, scene in scenes.items()}
    counter = Counter(bench.report, sum(work.steps for work in works.values()))
    pieces = {name: attack.pieces(scene) for name, scene in scenes.items()}
    every = [(name, piece) for name, own in pieces.items() for piece in own]
    workers = bench.workers
    found: Iterator[Finding]
    if workers is None or len(every) == 1 or not workers.worth(lambda: sum(work.seconds for work in works.values())):
        found = (attack.run(_told(piece, counter), fitted.get(name)) for name, piece in every)
    else:
        # All pieces are handed out at once, so that no process waits for the end of a scene.
        found = workers.map(_work, [(attack, _alone(piece), fitted.get(name)) for name, piece in every], counter.add)
    for name, own in pieces.items():
        yield name, joined([next(found) for _ in own])


def joined(findings: list[Finding]) -> Finding:
    """The findings of pieces as one."""
    first = findings[0]
    if len(findings) == 1:
        return first
    if isinstance(first, Membership):
        raise ValueError("an attack that tells members from others runs in one piece")
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
