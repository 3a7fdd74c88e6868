"""Clipping: bound the norm of what is shared."""

from __future__ import annotations

import math
from typing import Literal

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength, trusting
from fedveil.fields import Positive, declared
from fedveil.registry import defenses
from fedveil.tree import Tree
from fedveil.tree import clipped as clipped  # re-exported


@defenses.register("clip")
@declared
class Clip(Defense):
    """Scale each client's update down to a norm of at most `norm`.

    The bound holds for the numbers that go out, rounded as they are, in half precision too: it is the sensitivity of
    noise that follows in a chain. On its own clipping hides the scale only, which an attack on the direction (cosine)
    does not need.
    """

    weaknesses = ("The direction of the gradient, which is all that a cosine attack matches, is untouched.",)
    strength = Strength("norm", "down", weak=10.0, strong=0.01)
    norm: Positive = 1.0  # largest norm of an update
    order: Literal["l1", "l2"] = "l2"  # in which norm it is measured
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    def protect(self, update: Tree, call: Call) -> Tree:
        """g · min(1, norm/‖g‖) for each client."""
        return clipped(update, self.norm, self.order)

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """The direction is right, and the size may have been any larger one."""
        factor = facts.in_target(self.acts_at) if self.order == "l2" else None
        return trusting(observed, bound=math.inf if factor is None else self.norm * factor)

    @property
    def random(self) -> bool:
        """No."""
        return False
