"""The last release of a `Guard`, and what a server sees of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from fedveil.defenses.base import MessageKind
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, capture
from fedveil.tree import Tree


class Last(NamedTuple):
    """The last release, kept until the next one."""

    kind: MessageKind
    update: Tree
    before: Tree | None  # the weights that the server sent; none: those that the model still has
    sizes: list[int]
    versions: list[int]

    def seen(
        self,
        trained: Mapping[str, nn.Parameter],
        *,
        lr: float | Sequence[float] | None,
        momentum: float,
        batch_sizes: Sequence[int] | None,
        facts: Mapping[str, Any],
    ) -> Capture:
        """What a server sees of it. `trained`: the parameters of the model as they are now."""
        if self.kind == "gradient" and self.before is None and self.versions != versions(trained):
            raise FedveilError(
                "the weights have moved since the last gradient: call capture() before optimizer.step(), or "
                "attach(optimizer, for_capture=True)"
            )
        sizes = self.sizes if batch_sizes is None else list(batch_sizes)
        if not sizes or 0 in sizes:
            raise FedveilError("Guard did not see this round's batches: give batch_sizes=, one for each local step")
        now = {name: parameter.detach() for name, parameter in trained.items()}
        return capture(
            now if self.before is None else self.before.row(0),
            self.update.row(0),
            kind=self.kind,
            batch_sizes=sizes,
            lr=lr,
            momentum=momentum,
            facts=facts,
        )


def versions(weights: Mapping[str, nn.Parameter]) -> list[int]:
    """Numbers that change whenever a weight is changed or replaced: they tell whether the optimizer has stepped."""
    return [number for weight in weights.values() for number in (id(weight), weight.data_ptr(), weight._version)]
