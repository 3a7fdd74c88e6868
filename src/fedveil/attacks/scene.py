"""What an attacker has: the public side of some updates, and nothing that is true of their victims alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal, Self

from torch import Tensor, nn

from fedveil.clients.engine import Backend, Loss
from fedveil.defenses.base import Knowledge, mean_tree, trusting
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates
from fedveil.progress import Report
from fedveil.streams import Streams
from fedveil.tasks.examples import TargetForm
from fedveil.tasks.inputs import Inputs, map_inputs
from fedveil.tasks.layout import Layout
from fedveil.workers import Workers

# What an attacker who repeats local steps supposes of the order of examples. searched: looked for together with the
# inputs; same: every epoch walks through them as they stand; mean: every step takes the mean gradient of all of them.
StepOrder = Literal["searched", "same", "mean"]


@dataclass(frozen=True, eq=False)
class Public:
    """What every attacker knows of a task: the model as code, the loss, and what an input looks like."""

    model: nn.Module
    loss: Loss
    layout: Layout
    classes: int | None = None
    target: TargetForm = field(default_factory=TargetForm)


@dataclass(frozen=True)
class LocalSteps:
    """The local training behind one FedAvg update, as far as an attacker knows it.

    Clients shuffle their examples in every epoch. The attacker knows how many steps of which rate and size were made,
    not which examples went into which batch; `order` says what it makes of that.
    """

    lr: tuple[float, ...]  # of each step
    batch_sizes: tuple[int, ...]  # of each step; every epoch goes through the same examples
    epochs: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    order: StepOrder = "searched"

    @classmethod
    def of(cls, updates: Updates, order: StepOrder = "searched") -> Self:
        """Those behind some updates."""
        rest = updates.momentum, updates.weight_decay
        return cls(updates.lr, updates.batch_sizes, updates.local_epochs, *rest, order)

    @property
    def steps(self) -> int:
        """Of all epochs."""
        return len(self.lr)

    @property
    def in_epoch(self) -> int:
        """Steps of one epoch."""
        return self.steps // self.epochs

    @property
    def examples(self) -> int:
        """Examples that every epoch goes through."""
        return sum(self.batch_sizes[: self.in_epoch])

    @property
    def ordered(self) -> bool:
        """Whether it matters at all which example comes when: not where every step takes all of them."""
        return self.in_epoch > 1

    @property
    def places(self) -> tuple[slice, ...]:
        """Where the batch of every step stands among the examples of all epochs, one epoch behind the other."""
        ends = list(accumulate(self.batch_sizes))
        return tuple(slice(end - size, end) for end, size in zip(ends, self.batch_sizes, strict=True))


@dataclass(frozen=True, eq=False)
class Candidates:
    """N batches that may be behind each of V updates. Which of them is, the attacker does not know."""

    inputs: Inputs  # (V, N, B, ...), as the layout has them: see `Scene.candidate_inputs`
    labels: Tensor  # (V, N, B, ...)

    @property
    def count(self) -> int:
        """The candidates N of one victim."""
        return self.labels.shape[1]

    def rows(self, index: slice | Sequence[int] | Tensor) -> Candidates:
        """Those of some victims."""
        return Candidates(map_inputs(lambda tensor: tensor[index], self.inputs), self.labels[index])


@dataclass(frozen=True, eq=False)
class Suspects:
    """N examples in question, in a drawn order: some were used and some were not. All updates share them."""

    inputs: Inputs  # (N, ...), as the layout has them: see `Scene.suspect_inputs`
    labels: Tensor  # (N,)

    @property
    def count(self) -> int:
        """Their number N."""
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Workbench:
    """What an attack runs with. Only backend and chunk touch the last bits of what it finds."""

    backend: Backend = "auto"
    chunk: int | None = None  # victims that are attacked at a time; none: as many as the attack finds best
    workers: Workers | None = None  # processes that share the work out
    report: Report | None = None  # is told (steps done, in all)
    scratch: Path | None = None  # where large intermediate results may lie; none: a temporary file


@dataclass(frozen=True, eq=False)
class Scene:
    """V updates of one model and one kind, as one attacker sees them. Every tensor's first axis is the victim.

    Of an attacker who saw several messages about each batch, `updates` holds their mean and `views` each of them: an
    attack that looks at `updates` alone attacks the mean.

    To one who looks at the trained model alone, `updates` is one row: that model as `before`, and an empty message.
    """

    public: Public
    updates: Updates
    streams: Streams  # the attacker's own randomness, one stream for each victim
    chain: Chain = field(default_factory=Chain)  # what the attacker knows of the defense: maybe nothing
    labels: Tensor | None = None  # (V, B, ...) where the attacker is told
    local: LocalSteps | None = None  # unroll these steps instead of matching one gradient
    candidates: Candidates | None = None  # for attacks that link
    suspects: Suspects | None = None  # for attacks that tell members from others
    bench: Workbench = field(default_factory=Workbench)
    views: tuple[Updates, ...] = ()  # every message about each batch, where there are several
    lengths: Tensor | None = None  # (V, B) tokens of each sentence, special ones included, where the attacker is told

    @property
    def seen(self) -> tuple[Updates, ...]:
        """The messages about each batch, one or several."""
        return self.views or (self.updates,)

    @property
    def count(self) -> int:
        """The number of victims V."""
        return self.updates.count

    @property
    def batch_size(self) -> int:
        """Examples behind one update."""
        return self.updates.examples

    @property
    def candidate_inputs(self) -> Inputs:
        """The candidates (V, N, B, ...) as the model takes them."""
        assert self.candidates is not None
        return self.public.layout.inputs(self.candidates.inputs)

    @property
    def suspect_inputs(self) -> Inputs:
        """The examples in question (N, ...) as the model takes them."""
        assert self.suspects is not None
        return self.public.layout.inputs(self.suspects.inputs)

    @property
    def like(self) -> Tensor:
        """A tensor of the type and on the device that the attack runs in: those of the update."""
        return next(iter(self.updates.message.values()))

    def knowledge(self) -> Knowledge:
        """What the attacker makes of the updates: an estimate of the true gradients, and the trust in each entry."""
        if not self.chain.defenses:
            return self.as_it_is()
        if self.views:
            return self.chain.knowledge_of([view.gradient for view in self.views], self.updates.facts)
        return self.chain.knowledge(self.updates.gradient, self.updates.facts)

    def as_it_is(self) -> Knowledge:
        """What one makes of them who knows no defense: every entry is trusted alike."""
        return trusting(mean_tree([view.gradient for view in self.views]) if self.views else self.updates.gradient)

    def rows(self, index: slice | Sequence[int] | Tensor) -> Scene:
        """Some of the victims."""
        return replace(
            self,
            updates=self.updates.rows(index),
            views=tuple(view.rows(index) for view in self.views),
            streams=self.streams.rows(index),
            labels=None if self.labels is None else self.labels[index],
            candidates=None if self.candidates is None else self.candidates.rows(index),
            lengths=None if self.lengths is None else self.lengths[index],
        )
