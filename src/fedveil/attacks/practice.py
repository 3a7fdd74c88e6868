"""Practice: auxiliary batches, and the updates that clients who hold them would send, with fresh noise each time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fedveil.attacks.lab import Lab
from fedveil.attacks.replay import Replay
from fedveil.attacks.scene import Scene
from fedveil.clients.choose import gradient_seconds
from fedveil.defenses.base import owns_step, step_weight
from fedveil.defenses.chain import Chain
from fedveil.defenses.likelihood import Reading, reading
from fedveil.defenses.updates import as_gradient
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tree import Tree

HELD_OUT = 0.1  # share of the auxiliary pictures that nothing is trained on
MOST_HELD_OUT = 1000
MOST_BYTES = 2**29  # of auxiliary pictures that are kept
SAME = 1e-3  # relative difference up to which two gradients count as one


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of auxiliary pictures: (n, B, ...) with labels (n, B)."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: slice | Tensor) -> Self:
        """Some of them."""
        return replace(self, inputs=self.inputs[index], labels=self.labels[index])

    def sorted(self) -> Self:
        """The same, the pictures of every batch by label."""
        order = self.labels.argsort(dim=1, stable=True)
        return replace(
            self, inputs=self.inputs[torch.arange(len(self))[:, None], order], labels=self.labels.gather(1, order)
        )

    def joined(self, index: Tensor) -> Self:
        """Batches (K, M·B, ...) that are put together of M each: index (K, M)."""
        inputs, labels = self.inputs[index], self.labels[index]
        return replace(self, inputs=inputs.flatten(1, 2), labels=labels.flatten(1))

    def drawn(self, count: int, size: int, streams: Streams) -> Self:
        """So many batches of that size at random, of batches of one. Every picture comes about equally often."""
        if size == 1 and count >= len(self):
            return self
        picks = [streams.permutation(len(self))[0] for _ in range(-(-count * size // len(self)))]
        return self.joined(torch.cat(picks)[: count * size].reshape(count, size))


def pictures(lab: Lab, most: int, name: str) -> tuple[Batches, Batches]:
    """Auxiliary pictures as batches of one: at most so many to train on, evenly spread, and others, held out."""
    there = 0 if lab.auxiliary is None else len(lab.auxiliary)
    if lab.auxiliary is None or there < 2:
        raise FedveilError(f"{name} learns from auxiliary pictures, and there are {there}: use another attack")
    first = lab.auxiliary.batch([0])[0]
    assert isinstance(first, Tensor)  # an attack on pictures
    room = max(2, MOST_BYTES // (first.numel() * first.element_size()))
    held = min(MOST_HELD_OUT, max(1, int(HELD_OUT * min(most, there, room))))
    count = min(most + held, there, room)
    inputs, labels = lab.auxiliary.batch(torch.arange(count) * there // count)
    assert isinstance(inputs, Tensor)
    order = lab.streams.fold(name, "held out").permutation(count)[0]
    whole = Batches(inputs[:, None], labels[:, None])
    return whole.rows(order[held:]), whole.rows(order[:held])


def practice_seconds(scene: Scene, count: int) -> float:
    """Estimated seconds to make so many updates; replaying a defense takes longer than is told here."""
    sample = scene.like.new_zeros(scene.batch_size, *scene.public.layout.shape), torch.zeros(1)
    return gradient_seconds(scene.public.model, sample, count * scene.updates.steps)


class Practice:
    """Makes the updates of auxiliary batches under the defense that the attacker knows.

    size: pictures of a batch. sample: at least one picture, for its shape.
    """

    def __init__(self, lab: Lab, size: int, sample: Batches) -> None:
        self._lab, self.size = lab, size  # pictures of a batch
        self._like = lab.model if size == lab.model.examples else replace(lab.model, batch_sizes=(size,))
        self._how = reading(lab.chain, self._like)
        # What looks at data that no attacker has is left out; what may have come before it is in the histories.
        known = (each for each in lab.chain.defenses if not (owns_step(each) and "validation" in each.needs))
        self._whole = replace(self._how, rule="cosine", replayed=Chain(tuple(known)), judge=None, of_step=False)
        first = Batches(sample.inputs[:1, :1], sample.labels[:1, :1]).joined(torch.zeros(1, size, dtype=torch.int64))
        self._replay = Replay(lab.public, self._like, (first.inputs[0], first.labels[0]))

    @property
    def entries(self) -> int:
        """Numbers in an update."""
        return self._like.before.size

    @property
    def random(self) -> bool:
        """Whether the same batch leads to another update each time."""
        return len(self._how.histories) > 1 or any(each.random for each in self._whole.replayed.defenses)

    @property
    def renews(self) -> bool:
        """Whether fresh noise can be put on updates that were made once: nothing else in them is random."""
        how = self._how
        alone = not any(each.random for each in how.replayed.defenses if each is not how.judge)
        return how.judge is not None and alone and len(how.histories) == 1

    def sent(self, batches: Batches, streams: Streams) -> Tree:
        """What clients with these batches would send, as gradients. Streams: one for each."""
        return self._as_gradients(self._made(self._whole, batches, streams), self._whole)

    def bare(self, batches: Batches, streams: Streams) -> Tree:
        """The same before the noise that `renewed` puts on it."""
        return self._made(self._how, batches, streams)

    def clear(self, batches: Batches, streams: Streams) -> Tree:
        """The same as gradients."""
        return self._as_gradients(self.bare(batches, streams), self._how)

    def renewed(self, bare: Tree, streams: Streams) -> Tree:
        """What would be sent of updates before their noise, with fresh noise on each, as gradients."""
        how = self._how
        assert how.judge is not None
        facts = replace(self._like.facts, before=self._before(bare.count))
        if how.of_step:
            facts = replace(facts, kind="gradient")
        return self._as_gradients(how.judge.resent(bare, facts, streams), how)

    def adds_up(self, sample: Batches) -> bool:
        """Whether the update of a batch, before its noise, is the mean of those of its pictures alone.

        If so, pictures can be put together to ever new batches without a further gradient. It is tried on two batches:
        batch norm breaks it, and a loss that is no mean. Local steps and defenses that act before the noise do, too.
        """
        how = self._how
        plain = not how.replayed.defenses and how.histories == (None,) and not how.bare
        if self.size == 1 or not plain or self._like.kind != "gradient" or (self.random and not self.renews):
            return False
        index = torch.arange(2 * self.size).reshape(2, self.size) % len(sample)
        some = sample.rows(slice(0, 2 * self.size))
        whole = self.bare(sample.joined(index), Streams.seeded(0, range(2))).flat()
        alone = self.of_one(sample).bare(some, Streams.seeded(0, range(len(some)))).flat()
        return bool((whole - alone[index].mean(1)).norm() <= SAME * whole.norm())

    def of_one(self, sample: Batches) -> Practice:
        """The same for single pictures."""
        return Practice(self._lab, 1, sample)

    def _before(self, count: int) -> Tree:
        return Tree.expand(self._like.before.row(0), count)

    def _as_gradients(self, made: Tree, how: Reading) -> Tree:
        """What was made, as an attacker who reads the messages sees it."""
        if how.bare or how.of_step:  # gradients already; a step adds what weight decay does
            return made + self._before(made.count) * self._like.weight_decay if how.of_step else made
        weight = step_weight(self._like.lr, self._like.momentum)
        return as_gradient(self._like.kind, made, self._before(made.count), weight)

    def _made(self, how: Reading, batches: Batches, streams: Streams) -> Tree:
        like, step = self._lab.model.before, self._replay.at_once(how.replayed)
        kind = next(iter(like.values()))
        parts: list[Tree] = []
        # Which history it was is not known: an equal share of each, one after another.
        places = [torch.arange(number, len(batches), len(how.histories)) for number in range(len(how.histories))]
        for first, own in zip(how.histories, places, strict=True):
            for rows in torch.split(own, step):
                some = batches.rows(rows)
                given = how.replayed, some.inputs.to(kind), some.labels.to(kind.device), streams.rows(rows)
                if how.bare or how.of_step:
                    parts.append(self._replay.gradients(*given, first, bare=how.bare))
                else:
                    parts.append(self._replay.messages(*given, first))
        made = Tree.concat([part for part in parts if part.count])
        return made if len(places) == 1 else made.rows(torch.cat(places).argsort())
