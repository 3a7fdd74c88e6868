"""No defense: the undefended ceiling."""

from __future__ import annotations

from fedveil.defenses.base import Defense
from fedveil.fields import declared
from fedveil.registry import defenses


@defenses.register("none")
@declared
class NoDefense(Defense):
    """Share the gradient as it is: the baseline that every defense is compared with."""

    matched_as_it_is = True
    weaknesses = ("The shared gradient is the true one.",)

    @property
    def random(self) -> bool:
        """No."""
        return False
