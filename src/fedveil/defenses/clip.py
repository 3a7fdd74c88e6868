"""Clipping: bound the norm of what is shared."""

from __future__ import annotations

from typing import Literal

from fedveil.clients.batch import ClientBatch
from fedveil.defenses.base import Defense, Strength
from fedveil.fields import Positive, declared
from fedveil.registry import defenses
from fedveil.tree import Tree


@defenses.register("clip")
@declared
class Clip(Defense):
    """Scale each client's update down to a norm of at most `norm`.

    Bounds the sensitivity for noise that follows in a chain; on its own it hides the scale only, which an attack
    on the direction (cosine) does not need.
    """

    reads_data = False
    matched_as_it_is = True
    weaknesses = ("The direction of the gradient, which is all that a cosine attack matches, is untouched.",)
    strength = Strength("norm", "down")
    norm: Positive = 1.0  # largest norm of an update
    order: Literal["l1", "l2"] = "l2"  # in which norm it is measured
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    def protect(self, update: Tree, batch: ClientBatch) -> Tree:
        """g · min(1, norm/‖g‖) for each client."""
        return clipped(update, self.norm, self.order)


def clipped(update: Tree, norm: float, order: Literal["l1", "l2"] = "l2") -> Tree:
    """Every row scaled down to a norm of at most `norm`."""
    length = update.norm(1.0 if order == "l1" else 2.0)
    return update * (norm / length).clamp_max(1.0)  # a length of 0 gives infinity, cut to 1
