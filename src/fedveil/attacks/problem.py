"""What a matching attack is given: a target, the trust in each of its entries, and all that is needed to match it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.attacks.candidate import Learned
from fedveil.attacks.priors import Box
from fedveil.attacks.scene import LocalSteps, Scene
from fedveil.clients.engine import Loss
from fedveil.defenses.base import Rejoin, Reweight, StepsBefore
from fedveil.streams import Streams
from fedveil.tasks.examples import TargetForm
from fedveil.tree import Tree


@dataclass(frozen=True)
class Problem:
    """V victims that share a model and shapes: every tensor's first axis is the victim.

    Naive, adaptive, floor and ceiling differ in `target` and `weight` only, so that compiled code serves several.
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
    form: TargetForm = field(default_factory=TargetForm)  # what one target looks like
    labels: Tensor | None = None  # (V, B, ...) where they are known
    box: Box | None = None
    local: LocalSteps | None = None  # unroll these steps instead of matching one gradient
    behind: LocalSteps | None = None  # the local steps that the update stands for, whether they are unrolled or not
    order: Tensor | None = None  # (V, epochs, B): which example stands where in each local epoch, as far as was found
    learned: Learned = field(default_factory=dict)  # what the attack fitted, for candidates that need it
    reweight: Reweight | None = None  # see Knowledge
    views: tuple[Tree, ...] = ()  # what each of several messages says, and
    rejoin: Rejoin | None = None  # how they are put together anew: see Knowledge
    before: tuple[StepsBefore, ...] = ()  # steps that the victim may have made first: try each; keep the lowest cost

    @classmethod
    def of(cls, scene: Scene, learned: Learned | None = None) -> Self:
        """What an attacker who has this scene matches."""
        known, public = scene.knowledge(), scene.public
        return cls(
            model=public.model,
            loss=public.loss,
            params=scene.updates.before,
            buffers=scene.updates.buffers,
            target=known.target,
            weight=known.weight,
            shape=public.layout.shape,
            batch_size=scene.batch_size,
            streams=scene.streams,
            classes=public.classes,
            form=public.target,
            labels=scene.labels,
            box=public.layout.box,
            local=scene.local,
            behind=None if scene.updates.kind == "gradient" else LocalSteps.of(scene.updates),
            learned=learned or {},
            reweight=known.reweight,
            views=known.views,
            rejoin=known.rejoin,
            before=known.before,
        )

    @property
    def count(self) -> int:
        """The number of victims V."""
        return self.target.count

    @property
    def like(self) -> Tensor:
        """A tensor of the type and on the device that the attack runs in: those of the update."""
        return next(iter(self.target.values()))

    def reweighed(self, made: Tree) -> Problem:
        """The problem with the trust in each entry that what a candidate would have sent gives it."""
        if self.rejoin is not None:
            target, weight = self.rejoin(self.views, made)
            return replace(self, target=target, weight=weight)
        return self if self.reweight is None else replace(self, weight=self.reweight(self.target, made))

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
            views=tuple(view.rows(index) for view in self.views),
            labels=None if self.labels is None else self.labels[index],
            order=None if self.order is None else self.order[index],
            streams=self.streams.rows(index),
        )
