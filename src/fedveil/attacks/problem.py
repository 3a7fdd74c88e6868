"""What a matching attack is given: a target, the trust in each of its entries, and all that is needed to match it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

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

if TYPE_CHECKING:
    from fedveil.attacks.embedding_space import EmbeddingSpace


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
    text: EmbeddingSpace | None = None  # of sentences, whose embeddings are the inputs that are searched for
    left_out: tuple[str, ...] = ()  # tensors of an update that are not matched

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

    def without_left_out(self, tree: Tree) -> Tree:
        """A tree of an update's names without those that are not matched; one copy that is repeated stays one."""
        if not any(name in tree for name in self.left_out):
            return tree
        if tree.repeated:
            return Tree.expand({n: t for n, t in tree.row(0).items() if n not in self.left_out}, tree.count)
        return Tree({name: tensor for name, tensor in tree.items() if name not in self.left_out})

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
            text=None if self.text is None else self.text.rows(index),
            streams=self.streams.rows(index),
        )
