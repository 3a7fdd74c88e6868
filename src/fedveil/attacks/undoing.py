"""Undoing what a data defense did: from where the gradient was taken back to the data."""

from __future__ import annotations

from torch import Tensor

from fedveil.attacks.replay import Replay
from fedveil.attacks.scene import Scene

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
