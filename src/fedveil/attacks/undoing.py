"""Undoing what a data defense did: from where the gradient was taken back to the data."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.attacks.embedding_space import EmbeddingSpace
from fedveil.attacks.replay import Replay
from fedveil.attacks.scene import Scene
from fedveil.tasks.inputs import take

ROUNDS = 8  # of the iteration: each halves what is left, as far as the perturbation depends smoothly on the data
DRAWS = 4  # replays of a perturbation, which starts at random: their mean is subtracted


def undone(scene: Scene, moved: Tensor, labels: Tensor) -> Tensor:
    """The inputs x (V, B, ...) that a known data defense moves to `moved`, as nearly as replaying it tells.

    A perturbation δ(x) follows from the data but for its random start. So x = moved − δ(x) is solved by repeating
    x ← ½x + ½(moved − δ(x)) from the moved inputs themselves, within the valid range.
    """
    box = scene.public.layout.box
    alike = scene.updates.before.repeated and scene.updates.buffers.repeated
    groups = [list(range(scene.count))] if alike else [[victim] for victim in range(scene.count)]
    replay = Replay(scene.public, scene.updates.rows([0]), (moved[0], labels[0]), scene.bench.backend)
    found = moved.clone()
    for group in groups:
        own, at = replay.of(scene.updates.rows(group[:1])), found[group]
        for number in range(ROUNDS):
            steps = 0.0 * at
            for draw in range(DRAWS):
                streams = scene.streams.rows(group).fold("undo", number, draw)
                steps = steps + (own.moved(scene.chain, at, labels[group], streams) - at) / DRAWS
            at = (at + moved[group] - steps) / 2
            at = at if box is None else at.clamp(*box)
        found[group] = at
    return found


def undone_sentences(scene: Scene, space: EmbeddingSpace, moved: Tensor, labels: Tensor) -> Tensor:
    """The sentences (V, B, length) whose embeddings a known data defense moves to `moved` (V, B, places, width).

    The perturbation of the sentences that were found last is replayed and taken off, and what is left is read anew.
    """
    found, layout = space.read(moved), scene.public.layout
    first = scene.rows(slice(0, 1))
    sample = take(layout.inputs(found), 0), labels[0]
    replay = Replay(scene.public, first.updates, sample, scene.bench.backend)
    alike = scene.updates.before.repeated and scene.updates.buffers.repeated
    groups = [list(range(scene.count))] if alike else [[victim] for victim in range(scene.count)]
    for group in groups:
        own = replay.of(scene.updates.rows(group[:1]))
        for number in range(ROUNDS):
            before, steps = found[group], 0.0 * moved[group]
            for draw in range(DRAWS):
                streams = scene.streams.rows(group).fold("undo", number, draw)
                offset = own.moved(scene.chain, layout.inputs(before), labels[group], streams)
                steps = steps + offset[..., : steps.shape[2], :] / DRAWS
            found[group] = space.rows(group).read(moved[group] - steps)
            if torch.equal(found[group], before):
                break
    return found
