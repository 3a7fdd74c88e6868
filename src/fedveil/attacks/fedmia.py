"""FedMIA: an example that an update points to, and the updates of others do not, was probably the sender's."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from torch import Tensor

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.finding import Membership, Question
from fedveil.attacks.scene import Scene
from fedveil.attacks.update_alignment import UpdateAlignment, alignments
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import attacks

FEWEST = 3  # updates: two others are the fewest that have a spread
_TINY = 1e-12


@attacks.register("fedmia")
@declared
class FedMIA(Attack):
    """Take an example for a member of an update if that aligns with it far better than the updates of others do.

    The alignments of an example's gradient with all other updates of the round, which were made without it, are a
    Gaussian reference; the score is how far above it the alignment with the one update lies (one tail). No reference
    model is trained: the other clients stand in for them.
    """

    paper: ClassVar[str] = "Zhu et al., FedMIA: An Effective Membership Inference Attack, CVPR 2025"
    question: ClassVar[Question] = "member"
    modalities: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset({"suspects"})
    revision: ClassVar[int] = 1

    def check(self, scene: Scene) -> None:
        """A single update has nothing to stand beside."""
        if scene.count < FEWEST:
            raise FedveilError(f"{self.name} sets each update beside others: attack at least {FEWEST} (victims)")

    def estimate(self, scene: Scene) -> Work:
        """As for plain alignment."""
        return UpdateAlignment().estimate(scene)

    def run(self, scene: Scene, fitted: Any = None) -> Membership:
        """How far above its alignment with the other updates every example's alignment with each update is."""
        begun = time.perf_counter()
        return Membership(beside_others(alignments(scene)), time.perf_counter() - begun)


def beside_others(aligned: Tensor) -> Tensor:
    """Each of (V, N) values less the mean of the others in its column, in their standard deviations."""
    others = len(aligned) - 1
    mean = (aligned.sum(0) - aligned) / others
    # The squares of what is left, not the mean of squares less the square of the mean: these are nearly equal.
    spread = ((aligned[None] - mean[:, None]).square().sum(1) - (aligned - mean).square()) / others
    return (aligned - mean) / spread.clamp_min(_TINY**2).sqrt()
