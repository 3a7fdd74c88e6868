"""The loss threshold: what a trained model is surer of was probably in its training."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Literal

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.confidence import confidences
from fedveil.attacks.finding import Membership, Question
from fedveil.attacks.scene import Scene
from fedveil.clients.choose import gradient_seconds
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import attacks
from fedveil.tasks.inputs import take


@attacks.register("loss-threshold")
@declared
class LossThreshold(Attack):
    """Take an example for a member if the trained model has a small loss on it: memory shows where it overfits.

    The simplest test, on the global model alone. It needs no other data, and knowing the defense does not change it.
    """

    paper: ClassVar[str] = "Yeom et al., Privacy Risk in Machine Learning, 2018"
    question: ClassVar[Question] = "member"
    looks_at: ClassVar[Literal["updates", "model"]] = "model"
    modalities: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset({"suspects"})
    revision: ClassVar[int] = 1

    def estimate(self, scene: Scene) -> Work:
        """A forward pass for every example."""
        return Work(1, forward_seconds(scene))

    def run(self, scene: Scene, fitted: Any = None) -> Membership:
        """How sure the model is of every example."""
        if scene.suspects is None:
            raise FedveilError("a test of membership needs examples in question, and here there are none")
        begun = time.perf_counter()
        weights = {**scene.updates.before.row(0), **scene.updates.buffers.row(0)}
        scores = confidences(scene.public, weights, scene.suspects)
        return Membership(scores[None], time.perf_counter() - begun)


def forward_seconds(scene: Scene) -> float:
    """What it takes to put all examples in question through the model once."""
    if scene.suspects is None:
        return 0.0
    one = take(scene.suspect_inputs, slice(0, 1)), scene.suspects.labels[:1]
    return gradient_seconds(scene.public.model, one, scene.suspects.count) / 3  # a gradient is about three passes
