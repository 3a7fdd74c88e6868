"""A kind of data: how it is scored, shown and told from others. The rest of fedveil asks here and names no metric.

This module and the modalities' own are read without torch: scoring imports it where it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.leakage.truths import Truths
    from fedveil.tasks.examples import Examples
    from fedveil.tasks.layout import Layout
    from fedveil.tasks.task import Task

LINKED = "linked"  # the metric of every link test, whatever the data: it compares updates


@dataclass(frozen=True, kw_only=True)
class Words:
    """What the data are called in sentences."""

    one: str  # "image"
    many: str  # "images"
    rebuilt: str  # what an attack rebuilds: "a picture"
    mean: str  # what one can hand in without any update: "mean image"
    picked: str  # of one that the headline says yes to
    not_picked: str


@dataclass(frozen=True, eq=False)
class Scores:
    """What a modality says of the reconstructions of V victims with B examples each, in the originals' order."""

    values: dict[str, Tensor]  # metric -> (V·B,); booleans where the metric is a share
    exhibit: Tensor  # (V·B, ...): what a report shows
    on_the_way: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # metric -> share of the steps -> (V·B,)


class Modality(ABC):
    """How a kind of data is scored, shown and told from others.

    An instance from `MODALITIES` knows the words; `equipped` gives one that can score the examples of a task.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 1  # raised when the same reconstructions get other scores
    words: ClassVar[Words]
    headline: ClassVar[tuple[str, ...]]  # the shares that decide what reconstruction leaks; the larger one counts
    shown: ClassVar[tuple[str, ...]]  # the columns of a short table
    nearness: ClassVar[str]  # puts rows in order whose headline is equal: more is nearer
    caption: ClassVar[tuple[str, ...]]  # stands beside each exhibit: the first of these that was measured
    measure_notes: ClassVar[Mapping[str, str]] = {}  # what a reader must know where a headline decided

    # ---- before an audit -------------------------------------------------------------------------------------

    @abstractmethod
    def check(self, task: Task, tools: Mapping[str, str]) -> None:
        """Refuse examples that cannot be scored, and tools that are not there, in one line each."""

    @abstractmethod
    def equipped(self, task: Task, tools: Mapping[str, str]) -> tuple[Self, list[str]]:
        """The modality for the examples of a task with its own judges, and a sentence on each of these.

        tools: by name, such as "reference": "trained"; what a modality does not know it does not use.
        """

    @abstractmethod
    def layout(self, shape: tuple[int, ...]) -> Layout:
        """What an attacker knows of the form of inputs of this shape."""

    def described(self) -> dict[str, Any]:
        """All that scores depend on beside what is scored: part of the key under which they are kept."""
        return {"modality": self.name, "revision": self.revision}

    @abstractmethod
    def floor(self, train: Examples) -> Tensor:
        """What an attacker can hand in for every victim without seeing an update: shape (...)."""

    def distractors(
        self, originals: Tensor, labels: Tensor, pool: tuple[Tensor, Tensor], *, count: int, seed: int
    ) -> Tensor:
        """Held-out examples to tell each original (N, ...) from: indices (N, count - 1) into the pool.

        pool: examples and their labels.
        """
        from fedveil.leakage.distractors import choose

        return choose(originals, labels, *pool, count=count, seed=seed)

    # ---- after the attack ------------------------------------------------------------------------------------

    @abstractmethod
    def score(self, inputs: Tensor, truths: Truths, iterates: Sequence[Tensor] = ()) -> Scores:
        """Every metric of one role's reconstructions (V, B, ...), whatever other roles got.

        iterates: the same on the way there, (V, B, ...) each. They are read one at a time, in order.
        """

    def legend(self) -> dict[str, Any] | None:
        """What is needed to read the exhibits, beside what is in them; None: they show themselves."""
        return None

    def pieces(self, shown: Iterable[NDArray[np.float32]]) -> dict[str, Any] | None:
        """How the tokens in exhibits are written; None of what is no text."""
        return None

    def relate(self, values: Mapping[str, Mapping[str, Tensor]], floors: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """The values of several roles with what only a comparison with the floors tells.

        floors: the names among `values` of those who had no update.
        """
        return {name: dict(each) for name, each in values.items()}

    @abstractmethod
    def exhibit(self, inputs: Tensor) -> Tensor:
        """What a report shows of inputs (N, ...)."""

    # ---- words -----------------------------------------------------------------------------------------------

    @abstractmethod
    def recognizable(self, values: Mapping[str, ArrayLike], least: float) -> NDArray[np.bool_] | None:
        """Which reconstructions a person would recognize; None where that was not measured.

        least: the similarity from which on they count, between 0 and 1.
        """

    @abstractmethod
    def recognizable_note(self, least: float) -> str:
        """What counts as recognizable, in a sentence."""

    def picks(self, among: int) -> str:
        """What the headline counts: "picks the right image out of 100"."""
        return f"picks the right {self.words.one} out of {among}"
