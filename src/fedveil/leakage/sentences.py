"""Sentences: compared token by token and word by word. Readable without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedveil.errors import FedveilError
from fedveil.leakage.modality import Modality, Scores, Words

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.leakage.truths import Truths
    from fedveil.tasks.examples import Examples
    from fedveil.tasks.layout import Layout
    from fedveil.tasks.task import Task
    from fedveil.tasks.text_form import TextForm


@dataclass(frozen=True, eq=False)
class Sentences(Modality):
    """Sentences of tokens, with nothing in the places behind the last: see `fedveil.tasks.text_form`."""

    name = "sentences"
    words = Words(
        one="sentence",
        many="sentences",
        rebuilt="a sentence",
        mean="most frequent words",
        picked="identified",
        not_picked="not identified",
    )
    headline = ("identified",)
    shown = ("identified", "whole_sentences", "rouge2", "rougeL", "rouge1")  # ROUGE-1, last, is blind to order
    nearness = "rougeL"
    caption = ("rougeL",)

    text: TextForm | None = None

    # ---- before an audit -------------------------------------------------------------------------------------

    def check(self, task: Task, tools: Mapping[str, str]) -> None:
        """Refuse what is no text, a distance of pictures, and a missing library."""
        from fedveil.tasks.vocabulary import text_library

        if task.text is None:
            raise FedveilError(f"{task.name} is no text: sentences have a vocabulary")
        if tools.get("lpips", "none") != "none":
            raise FedveilError(f"lpips compares pictures, and {task.name} is text: use lpips 'none'")
        text_library("rouge_score")

    def equipped(self, task: Task, tools: Mapping[str, str]) -> tuple[Self, list[str]]:
        """With the vocabulary of a task."""
        said = (
            "ROUGE-1, -2 and -L are F-measures of the package rouge-score, over lower-case words, without stemming; "
            "the other numbers are of the model's own tokens, without special ones."
        )
        return replace(self, text=task.text), [said]

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """The places of a sentence, and its vocabulary."""
        from fedveil.tasks.layout import Layout

        return Layout(self.name, (self.form.length,), text=self.form)

    def described(self) -> dict[str, Any]:
        """The vocabulary."""
        return {**super().described(), "text": self.form.described()}

    def floor(self, train: Examples) -> Tensor:
        """The most frequent tokens of the training data, as many as a sentence has in the mean."""
        from fedveil.leakage.sentence_scores import most_frequent

        return most_frequent(train)

    def distractors(
        self, originals: Tensor, labels: Tensor, pool: tuple[Tensor, Tensor], *, count: int, seed: int
    ) -> Tensor:
        """Held-out sentences of the original's own length, or the nearest to it: a length alone must not tell."""
        from fedveil.leakage.distractors import choose
        from fedveil.leakage.sentence_scores import lengths

        return choose(originals, lengths(originals), pool[0], lengths(pool[0]), count=count, seed=seed)

    @property
    def form(self) -> TextForm:
        """The vocabulary, which only an equipped modality has."""
        if self.text is None:
            raise ValueError("sentences are scored and shown by the vocabulary of a task: see `equipped`")
        return self.text

    # ---- after the attack ------------------------------------------------------------------------------------

    def score(self, inputs: Tensor, truths: Truths, iterates: Sequence[Tensor] = ()) -> Scores:
        """Every metric, one value per sentence; within a batch reconstructions are assigned to originals first."""
        from fedveil.leakage.sentence_scores import score

        return score(self, inputs, truths)

    def exhibit(self, inputs: Tensor) -> Tensor:
        """The tokens."""
        return inputs.float()

    def pieces(self, shown: Iterable[NDArray[np.float32]]) -> dict[str, Any]:
        """What is needed to read exhibits: how each of their tokens is written, and which stand for no text."""
        used = sorted({int(token) for each in shown for token in np.unique(each) if token >= 0})
        return {
            "pieces": {str(token): self.form.spelled(token) for token in used},
            "special": sorted(self.form.special & set(used)),
        }

    # ---- words -----------------------------------------------------------------------------------------------

    def recognizable(self, values: Mapping[str, ArrayLike], least: float) -> NDArray[np.bool_] | None:
        """Nearest to the right sentence, and like it enough."""
        if "rougeL" not in values or "identified" not in values:
            return None
        enough: NDArray[np.bool_] = np.asarray(values["rougeL"], dtype=float) >= least
        return enough & (np.asarray(values["identified"], dtype=float) >= 0.5)

    def recognizable_note(self, least: float) -> str:
        """By the words that come in the right order."""
        return (
            "A sentence counts as recognizable where it is nearer to the right sentence than to all the others, and at "
            f"least {100 * least:g} % of its words are the original's, in their order (ROUGE-L)."
        )
