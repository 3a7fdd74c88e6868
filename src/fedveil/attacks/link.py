"""The link test: which of several candidates is behind an update? Nothing is reconstructed for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.finding import Links, Question
from fedveil.attacks.replay import Replay
from fedveil.attacks.scene import Scene
from fedveil.clients.choose import gradient_seconds
from fedveil.defenses.base import step_weight
from fedveil.defenses.likelihood import Reading, closeness, informed_reading, reading, similarity, step_gradient
from fedveil.defenses.updates import as_gradient
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import attacks
from fedveil.tasks.inputs import map_inputs, take
from fedveil.tree import Tree

AT_ONCE = 4  # victims of a piece, which has a model of its own


@attacks.register("link")
@declared
class LinkTest(Attack):
    """Pick the one of several candidates that explains an update best, by the likelihood of its defense.

    Each candidate's update is computed as its client would have, and compared with the one that was sent: under a
    known defense by the log density of what it sends (`Defense.log_density`), else by their cosine. Of several messages
    about one batch the log densities add up, and the cosine is to their mean. Nothing is optimized and nothing tuned.
    """

    question: ClassVar[Question] = "link"
    modalities: ClassVar[tuple[str, ...]] = ()  # it compares updates
    needs: ClassVar[frozenset[str]] = frozenset({"candidates"})
    revision: ClassVar[int] = 1

    def estimate(self, scene: Scene) -> Work:
        """A step for every candidate; replaying a defense takes longer than is told here."""
        if scene.candidates is None:
            return Work()
        count = scene.count * scene.candidates.count
        sample = map_inputs(lambda tensor: tensor[0, 0], scene.candidate_inputs), scene.candidates.labels[0, 0]
        return Work(count, gradient_seconds(scene.public.model, sample, count * scene.updates.steps))

    def pieces(self, scene: Scene) -> list[Scene]:
        """A victim is compared with its own candidates alone: any few of them can be a piece."""
        return [scene.rows(slice(start, start + AT_ONCE)) for start in range(0, scene.count, AT_ONCE)]

    def run(self, scene: Scene, fitted: Any = None) -> Links:
        """The score of every candidate of every victim."""
        if scene.candidates is None:
            raise FedveilError("the link test picks one of several candidates, and here there are none")
        begun, count = time.perf_counter(), scene.candidates.count
        sample = map_inputs(lambda tensor: tensor[0, 0], scene.candidate_inputs), scene.candidates.labels[0, 0]
        replay = Replay(scene.public, scene.updates.rows([0]), sample, scene.bench.backend)
        scores = torch.empty(scene.count, count, dtype=torch.float64)
        exact = torch.empty(scene.count, dtype=torch.bool)
        for victim in range(scene.count):

            def note(done: int, before: int = victim * count) -> None:
                if scene.bench.report is not None:
                    scene.bench.report(before + done, scene.count * count)

            own = scene.rows([victim])
            how = reading(own.chain, own.updates)
            found = _scores(own, replay, how, note)
            if found is None:  # a law that has no closed form at these settings
                how = informed_reading(own.chain, own.updates)
                found = _scores(own, replay, how, note)
            assert found is not None
            scores[victim], exact[victim] = found, how.exact and replay.exact
        return Links(scores, exact, time.perf_counter() - begun)


def _scores(scene: Scene, replay: Replay, how: Reading, note: Callable[[int], None]) -> Tensor | None:
    """How well each candidate explains the one update of a scene: shape (N,)."""
    assert scene.candidates is not None
    inputs, labels = map_inputs(lambda tensor: tensor[0], scene.candidate_inputs), scene.candidates.labels[0]
    replay, compare = replay.of(scene.updates), _comparison(scene, how)
    streams, step = scene.streams.fold("link"), replay.at_once(how.replayed)
    parts = []
    for start in range(0, len(labels), step):
        part = slice(start, start + step)
        # All candidates get the same random numbers: luck must not tell them apart.
        given = how.replayed, take(inputs, part), labels[part], streams.rows([0] * len(labels[part]))
        tries = []
        for first in how.histories:
            if how.bare or how.of_step:
                made = replay.gradients(*given, first, bare=how.bare)
            else:
                made = replay.messages(*given, first)
            found = compare(made)
            if found is None:
                return None
            tries.append(found)
        parts.append(torch.stack(tries).amax(0))
        note(min(start + step, len(labels)))
    return torch.cat(parts)


def _comparison(scene: Scene, how: Reading) -> Callable[[Tree], Tensor | None]:
    """The score of some candidates' messages, or gradients, against what was sent."""
    updates, facts = scene.updates, scene.updates.facts
    if how.judge is not None:
        judge = how.judge
        observed = [(step_gradient(view) if how.of_step else view.message).row(0) for view in scene.seen]
        if how.of_step:
            facts = replace(facts, kind="gradient")

        def log_likelihood(made: Tree) -> Tensor | None:
            """Of all messages about the batch: their random numbers are independent."""
            found = [judge.log_density(Tree.expand(each, made.count), made, facts) for each in observed]
            known = [each for each in found if each is not None]
            return sum(known[1:], known[0]) if len(known) == len(found) else None

        return log_likelihood

    def gradients(made: Tree) -> Tree:
        before = Tree.expand(updates.before.row(0), made.count)
        return as_gradient(updates.kind, made, before, step_weight(updates.lr, updates.momentum))

    target = updates.gradient
    if how.rule == "distance":
        return lambda made: closeness(_expanded(target, made), gradients(made))
    known = scene.knowledge() if how.rule == "informed" else scene.as_it_is()

    def cosine(made: Tree) -> Tensor:
        own = replace(known, target=_expanded(known.target, made), weight=_expanded(known.weight, made))
        return similarity(own, gradients(made))

    return cosine


def _expanded(one: Tree, like: Tree) -> Tree:
    return Tree.expand(one.row(0), like.count)
