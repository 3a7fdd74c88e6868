"""Lessons for a network that reads updates: auxiliary batches with the features of what is sent of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedveil.attacks.features import Features
from fedveil.attacks.practice import Batches, Practice
from fedveil.attacks.sketch import Sketch
from fedveil.streams import Streams
from fedveil.tree import Tree

MOST_BYTES = 2**30  # of updates before their noise that are kept
REDRAWS = 3  # times that updates are made where noise cannot be put on them afterwards, or there is no room for them
ROWS = 2  # updates that one principal direction is found by
AT_ONCE = 512  # updates that are made at a time


@dataclass(frozen=True, eq=False)
class Bank:
    """Updates that were made once, from which lessons with fresh noise are drawn.

    Where the update of a batch is the mean of those of its pictures, the latter are kept, and every lesson is a batch
    that was never met before. Updates before their noise are kept whole. Those of a defense that draws its numbers
    earlier are made a few times; and where nothing is random, once.
    """

    features: Features
    batches: Batches  # that updates were made of
    joined: int  # how many of them make the batch of a lesson
    kept: Tensor  # (n, entries) updates before their noise, or (draws, n, size) features
    practice: Practice | None = None  # puts noise on the former
    like: Tree | None = None  # their form

    @classmethod
    def of(
        cls, practice: Practice, train: Batches, sketch: Sketch, most: int, directions: int, streams: Streams
    ) -> Self:
        """Of at most so many batches of single pictures, and principal directions of their updates (0: none)."""
        size, adds_up = practice.size, practice.adds_up(train)
        maker = practice.of_one(train) if adds_up else practice
        batches = train if adds_up else train.drawn(min(most, len(train)), size, streams.fold("batches"))
        room = len(batches) * maker.entries * 4 <= MOST_BYTES
        some = train.drawn(_enough(directions, len(train)), size, streams.fold("some"))
        features = _fitted(practice, some, sketch, directions, streams.fold("fitted"))
        if practice.renews and room:
            kept = made(maker.bare, batches, streams.fold("made"), lambda tree: tree.flat().float().cpu())
            like = maker.bare(batches.rows(slice(0, 1)), streams.fold("like"))
            return cls(features, batches, size if adds_up else 1, kept, practice, like)
        if adds_up and practice.random:  # no room: batches as they are
            return cls.of_whole(practice, train.drawn(len(train), size, streams.fold("batches")), features, streams)
        if adds_up:
            return cls(features, batches, size, made(maker.sent, batches, streams, features)[None])
        return cls.of_whole(practice, batches, features, streams)

    @classmethod
    def of_whole(cls, practice: Practice, batches: Batches, features: Features, streams: Streams) -> Self:
        """The features of whole batches, made a few times if anything is random in them."""
        draws = REDRAWS if practice.random else 1
        rows = [made(practice.sent, batches, streams.fold("made", draw), features) for draw in range(draws)]
        return cls(features, batches, 1, torch.stack(rows))

    def lesson(self, count: int, streams: Streams) -> tuple[Tensor, Batches]:
        """So many batches at random, and the features of what is sent of them: (count, size).

        streams: one, and then one for each batch; they go on from call to call.
        """
        choice, noise = streams.rows([0]), streams.rows(slice(1, count + 1))
        index = choice.integers(len(self.batches), count, self.joined)[0]
        batches = self.batches.joined(index)
        if self.practice is None:
            draw = choice.integers(len(self.kept), count, 1)[0]
            return self.kept[draw, index].mean(1), batches
        assert self.like is not None
        bare = self.kept[index[:, 0]] if self.joined == 1 else self.kept[index].mean(1)
        form = next(iter(self.like.values()))
        return self.features(self.practice.renewed(self.like.unflat(bare.to(form)), noise)), batches


def made(
    make: Callable[[Batches, Streams], Tree], batches: Batches, streams: Streams, take: Callable[[Tree], Tensor]
) -> Tensor:
    """What is taken of the updates of many batches, a part at a time. streams: one, for streams of the batches."""
    key = int(streams.key64())
    parts = []
    for start in range(0, len(batches), AT_ONCE):
        part = slice(start, min(start + AT_ONCE, len(batches)))
        own = Streams.seeded(key, range(part.start, part.stop), "batch")
        parts.append(take(make(batches.rows(part), own)))
    return torch.cat(parts)


def _enough(directions: int, there: int) -> int:
    return max(min(there, ROWS * directions if directions else AT_ONCE), 2)


def _fitted(practice: Practice, some: Batches, sketch: Sketch, directions: int, streams: Streams) -> Features:
    """The map from updates to features, fitted to those of some batches."""
    seen = made(practice.sent, some, streams.fold("seen"), sketch.rows)
    clear = seen
    if practice.renews:
        clear = made(practice.clear, some, streams.fold("clear"), sketch.rows)
    return Features.of(sketch, clear, seen, directions)
