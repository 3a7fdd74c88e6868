"""What an attacker has in hand, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.clients.engine import Loss
from fedveil.defenses.base import StepsBefore
from fedveil.streams import Streams
from fedveil.tree import Tree


@dataclass(frozen=True)
class LocalSteps:
    """The local training behind one FedAvg update, for an attacker who unrolls it.

    The attacker knows how many steps of which rate were made, not which examples went into which batch: it supposes
    that every epoch walks through the candidates in the same order.
    """

    steps: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Problem:
    """V victims that share a model and shapes: every tensor's first axis is the victim.

    Naive, adaptive, floor and ceiling differ in `target` and `weight` only, so that one compiled function serves all.
    """

    model: nn.Module
    loss: Loss
    params: Tree  # the model the update was computed at
    buffers: Tree
    target: Tree  # the observed update, or an estimate of the true one
    weight: Tree  # trust in each entry
    shape: tuple[int, ...]  # of one input
    batch_size: int
    streams: Streams  # the attacker's own randomness
    classes: int | None = None
    labels: Tensor | None = None  # (V, B) where they are known
    box: tuple[Tensor, Tensor] | None = None  # lowest and highest valid input, broadcast to `shape`
    local: LocalSteps | None = None  # unroll these steps instead of matching one gradient
    simulate: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()  # see Knowledge
    before: tuple[StepsBefore, ...] = ()  # steps the victim may have made first: each is tried, the best fit kept

    @property
    def count(self) -> int:
        """The number of victims V."""
        return self.target.count

    @property
    def like(self) -> Tensor:
        """A tensor of the type and on the device that the attack runs in: those of the update."""
        return next(iter(self.target.values()))

    def output(self, victim: int, inputs: Tensor) -> Tensor:
        """What the model that one victim was sent makes of some inputs; its buffers stay as they are."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.row(victim).items()}  # batch norm moves them
        with torch.no_grad():
            return functional_call(self.model, (self.params.row(victim), buffers), (inputs,))  # type: ignore[no-any-return]

    def rows(self, index: slice | Sequence[int] | Tensor) -> Problem:
        """Some of the victims."""
        return replace(
            self,
            params=self.params.rows(index),
            buffers=self.buffers.rows(index),
            target=self.target.rows(index),
            weight=self.weight.rows(index),
            labels=None if self.labels is None else self.labels[index],
            streams=self.streams.rows(index),
        )


@dataclass(frozen=True)
class Reconstruction:
    """What an attack recovered for every victim."""

    inputs: Tensor  # (V, B, ...), in the model's input space
    labels: Tensor  # (V, B)
    cost: Tensor  # (V,) final matching cost without priors
    steps: list[int]  # at which the cost and the iterates were noted
    costs: Tensor  # (V, len(steps))
    iterates: Tensor  # (len(steps), V, B, ...); the last is `inputs` before restarts were compared
    seconds: float

    @classmethod
    def concat(cls, parts: Sequence[Reconstruction]) -> Reconstruction:
        """The victims of several runs of one attack one after another."""
        return cls(
            inputs=torch.cat([part.inputs for part in parts]),
            labels=torch.cat([part.labels for part in parts]),
            cost=torch.cat([part.cost for part in parts]),
            steps=parts[0].steps,
            costs=torch.cat([part.costs for part in parts]),
            iterates=torch.cat([part.iterates for part in parts], dim=1),
            seconds=sum(part.seconds for part in parts),
        )

    def rows(self, index: slice | Tensor) -> Reconstruction:
        """Some of the victims; the time is shared out evenly."""
        inputs = self.inputs[index]
        return Reconstruction(
            inputs=inputs,
            labels=self.labels[index],
            cost=self.cost[index],
            steps=self.steps,
            costs=self.costs[index],
            iterates=self.iterates[:, index],
            seconds=self.seconds * len(inputs) / max(len(self.inputs), 1),
        )
