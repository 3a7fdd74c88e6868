"""Alignment: an update points where the gradients of its own examples point."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.finding import Membership, Question
from fedveil.attacks.replay import Replay
from fedveil.attacks.scene import Scene
from fedveil.clients.choose import gradient_seconds
from fedveil.defenses.likelihood import informed_reading, reading
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import attacks
from fedveil.tasks.inputs import map_inputs, take
from fedveil.tree import Tree

_TINY = 1e-30


@attacks.register("update-alignment")
@declared
class UpdateAlignment(Attack):
    """Take an example for a member of an update if its own gradient, at the global model, points the same way.

    Each score is the cosine of the two. Who knows the defense compares with an estimate of the update before it was
    protected, counts every entry by the trust in it, and puts each example through defenses that change inputs.
    """

    question: ClassVar[Question] = "member"
    modalities: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset({"suspects"})
    revision: ClassVar[int] = 1

    def estimate(self, scene: Scene) -> Work:
        """A gradient for every example; replaying a defense takes longer than is told here."""
        if scene.suspects is None:
            return Work()
        one = take(scene.suspect_inputs, slice(0, 1)), scene.suspects.labels[:1]
        return Work(scene.suspects.count, gradient_seconds(scene.public.model, one, scene.suspects.count))

    def run(self, scene: Scene, fitted: Any = None) -> Membership:
        """The cosine of every example's gradient with every update."""
        begun = time.perf_counter()
        return Membership(alignments(scene), time.perf_counter() - begun)


def alignments(scene: Scene) -> Tensor:
    """The weighted cosine of each of N examples' own gradients with each of V updates: shape (V, N)."""
    if scene.suspects is None:
        raise FedveilError("a test of membership needs examples in question, and here there are none")
    known = scene.knowledge()
    target, weight = known.target.flat(), known.weight.flat()
    pointed = weight * target
    length = (pointed * target).sum(1, keepdim=True).clamp_min(_TINY).sqrt()
    found = []
    for made in _gradients(scene):
        tries = []
        for each in made:
            own = each.flat()
            tries.append(own @ pointed.T / (own.square() @ weight.T).clamp_min(_TINY).sqrt())
        found.append(torch.stack(tries).amax(0))
        if scene.bench.report is not None:
            scene.bench.report(sum(map(len, found)), scene.suspects.count)
    return (torch.cat(found).T / length).double().cpu()


def _gradients(scene: Scene) -> Iterator[list[Tree]]:
    """The gradients of the examples in question, some at a time: under each history that a known defense may have."""
    assert scene.suspects is not None
    labels = scene.suspects.labels[:, None]
    inputs = map_inputs(lambda tensor: tensor[:, None], scene.suspect_inputs)
    like = replace(scene.updates.rows([0]), kind="gradient", lr=scene.updates.lr[:1], batch_sizes=(1,), local_epochs=1)
    how = informed_reading(scene.chain, scene.updates) if scene.chain.defenses else reading(scene.chain, scene.updates)
    replay = Replay(scene.public, like, (take(inputs, 0), labels[0]), scene.bench.backend)
    streams, step = scene.streams.fold("membership"), replay.at_once(how.replayed)
    for start in range(0, len(labels), step):
        part = slice(start, start + step)
        # All examples get the same random numbers: luck must not tell them apart.
        given = how.replayed, take(inputs, part), labels[part], streams.rows([0] * len(labels[part]))
        yield [replay.gradients(*given, first) for first in how.histories]
