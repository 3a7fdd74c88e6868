"""Sentences: originals beside what attackers made of them, with the tokens marked that are right, worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedveil.auditing.result import Images, Result, TextLegend
from fedveil.auditing.roles import Role
from fedveil.leakage.modalities import modality
from fedveil.report import formatting
from fedveil.report.grid import Exhibit, exhibits, worst_first
from fedveil.report.view import beside, lead, shown_roles

MOST_SENTENCES = 12  # that are shown
Found = Literal["right", "elsewhere", "wrong"]


@dataclass(frozen=True)
class Piece:
    """A token as it is written, and what became of it."""

    text: str
    found: Found = "wrong"


@dataclass(frozen=True)
class Attempt:
    """What one role made of a sentence."""

    role: Role
    attack: str  # that made it, where there are several
    pieces: list[Piece]
    right: str  # how many tokens of the original: "7 of 9"


@dataclass(frozen=True)
class ShownSentence:
    """One sentence and what attackers made of it."""

    name: str
    label: str
    original: str
    attempts: list[Attempt]


@dataclass(frozen=True)
class ShownSentences:
    """The sentences that are shown."""

    shown: list[ShownSentence]
    total: int


def sentences(result: Result, images: Images) -> ShownSentences | None:
    """The most leaked sentences first; None where no text was attacked."""
    legend, first = result.text, lead(result)
    if legend is None:
        return None
    kind = modality(result.modality)
    found = [(role, exhibits(result, images, beside(result, first, role), role)) for role in shown_roles(result)]
    order = worst_first(first, len(images.originals), (*kind.headline[:1], *kind.caption[:1]))
    shown = []
    for index in order[:MOST_SENTENCES]:
        original = content(legend, images.originals[index])
        label = "" if images.labels.ndim > 1 else formatting.label(int(images.labels[index]), result.label_names)
        attempts = [_attempt(legend, original, role, made[index]) for role, made in found if index < len(made)]
        text = "".join(written(legend, original)).strip()
        shown.append(ShownSentence(f"{kind.words.one.capitalize()} {index + 1}", label, text, attempts))
    return ShownSentences(shown, len(order))


def content(legend: TextLegend, tokens: NDArray[np.float32]) -> list[int]:
    """The tokens of a sentence that stand for text."""
    return [int(token) for token in tokens if token >= 0 and int(token) not in legend.special]


def written(legend: TextLegend, tokens: Sequence[int]) -> list[str]:
    """Each token as a part of the sentence."""
    return [legend.pieces.get(str(token), formatting.NONE) for token in tokens]


def marks(original: Sequence[int], made: Sequence[int]) -> list[Found]:
    """What became of every token of a reconstruction: right in order, or in the original elsewhere, or wrong.

    >>> marks([1, 2, 3, 4], [1, 9, 3, 4, 2])
    ['right', 'wrong', 'right', 'right', 'elsewhere']
    """
    aligned = SequenceMatcher(None, original, made, autojunk=False).get_matching_blocks()
    right = {block.b + step for block in aligned for step in range(block.size)}
    left = Counter(original) - Counter(made[place] for place in right)
    found: list[Found] = []
    for place, token in enumerate(made):
        if place in right:
            found.append("right")
        elif left[token] > 0:
            left[token] -= 1
            found.append("elsewhere")
        else:
            found.append("wrong")
    return found


def _attempt(legend: TextLegend, original: Sequence[int], role: Role, made: Exhibit) -> Attempt:
    tokens = content(legend, made.picture)
    found = marks(original, tokens)
    pieces = [Piece(text, mark) for text, mark in zip(written(legend, tokens), found, strict=True)]
    return Attempt(role, made.attack, pieces, f"{found.count('right')} of {len(original)}")
