"""What several clients sent, stacked: the one form in which updates reach an attacker, wherever they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from fedveil.defenses.base import Facts, MessageKind, mean_tree, step_weight
from fedveil.tree import Tree


@dataclass(frozen=True, eq=False)
class Updates:
    """The messages of V clients with what their receiver knows besides. Every tensor's first axis is the message.

    A `Capture` is one row of this, on its own and in a file.
    """

    kind: MessageKind
    before: Tree  # the weights that each client was sent
    message: Tree  # what it sent back
    buffers: Tree  # the model's buffers that it was sent
    lr: tuple[float, ...]  # of each local step
    batch_sizes: tuple[int, ...]  # of each local step
    momentum: float = 0.0
    weight_decay: float = 0.0
    local_epochs: int = 1

    @property
    def count(self) -> int:
        """The number of messages V."""
        return self.message.count

    @property
    def steps(self) -> int:
        """Local steps behind one message."""
        return len(self.lr)

    @property
    def examples(self) -> int:
        """Examples behind one message; local epochs see the same ones again."""
        return sum(self.batch_sizes[: self.steps // self.local_epochs])

    @property
    def facts(self) -> Facts:
        """What a defense's knowledge is made from besides the update itself."""
        return Facts(
            kind=self.kind,
            batch_size=self.examples,
            steps=self.steps,
            lr=self.lr[0],
            momentum=self.momentum,
            before=self.before,
        )

    @cached_property
    def gradient(self) -> Tree:
        """The gradient that each message stands for: the shared one, or the mean of those of the local steps.

        With momentum μ a step's gradient moves the weights in every later step too, by lr·(1 + μ + μ² + …) in all; the
        divisor is the sum of these factors, so that the result stays a mean of gradients, in which early steps
        weigh more. What weight decay added stays in.
        """
        return as_gradient(self.kind, self.message, self.before, step_weight(self.lr, self.momentum))

    def rows(self, index: slice | Sequence[int] | Tensor) -> Updates:
        """Some of the messages."""
        return replace(
            self,
            before=self.before.rows(index),
            message=self.message.rows(index),
            buffers=self.buffers.rows(index),
        )


def mean_of(views: Sequence[Updates]) -> Updates:
    """Several messages about the same batches as one: their mean."""
    return replace(views[0], message=mean_tree([each.message for each in views]))


def as_gradient(kind: MessageKind, message: Tree, before: Tree, weight: float) -> Tree:
    """Messages as gradients, given by how much a constant gradient of 1 would have moved a weight."""
    if kind == "gradient":
        return message
    return -message / weight if kind == "delta" else (before - message) / weight


def with_gradient(updates: Updates, gradient: Tree) -> Updates:
    """The updates of clients whose messages stand for other gradients."""
    weight = step_weight(updates.lr, updates.momentum)
    if updates.kind == "gradient":
        return replace(updates, message=gradient)
    change = -gradient * weight
    return replace(updates, message=change if updates.kind == "delta" else updates.before + change)
