"""What is true of attacked updates, and the other examples that it has to be told from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedveil.attacks.scene import Candidates
from fedveil.auditing.case import Case
from fedveil.leakage.modality import Modality
from fedveil.leakage.truths import Truths
from fedveil.streams import Streams
from fedveil.tasks.examples import ArrayExamples, Examples
from fedveil.tasks.inputs import Inputs
from fedveil.tasks.model_check import floating_type
from fedveil.tasks.text_form import tokens_of

MOST_HELD_OUT = 20_000  # examples that victims' are told from


@dataclass(frozen=True, eq=False)
class Originals:
    """What V victims really had, B examples each: only scoring sees it.

    Inputs are in single precision, in which they are judged whatever the model's own type is.
    """

    inputs: Tensor  # (V, B, ...)
    labels: Tensor  # (V, B, ...)
    seen: Tensor  # (V, B, ...): what the gradient was taken at
    round: int = 1


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples that no victim holds: to tell victims' from, and for attackers who have auxiliary data."""

    inputs: Tensor
    labels: Tensor
    mean_input: Tensor  # what an attacker can hand in without any update
    given: Examples | None  # every second one, where attackers get these

    @classmethod
    def of(cls, modality: Modality, train: Examples, test: Examples, *, taken: int = 0, gives: bool = False) -> Self:
        """The test examples, less the first `taken`, which are victims.

        gives: attackers get every second one, and the judges the others.
        """
        rows = list(range(taken, min(len(test), taken + MOST_HELD_OUT)))
        mine, theirs = (rows[::2], rows[1::2]) if gives else (rows, [])
        inputs, labels = test.subset(mine).batch(list(range(len(mine))))
        return cls(single(inputs), labels, modality.floor(train), test.subset(theirs) if theirs else None)

    @property
    def judged(self) -> Examples:
        """Those of the judges, as examples."""
        return ArrayExamples(self.inputs, self.labels)


@dataclass(frozen=True, eq=False)
class RoundTruth:
    """What is true of one round: for scoring only, but for the candidates, which an attacker who links is shown."""

    truths: Truths
    candidates: Candidates


def truth_of(case: Case, originals: Originals, held_out: HeldOut, *, one_example: bool) -> RoundTruth:
    """What the victims of a round really had, and held-out examples to tell theirs from.

    one_example: candidates differ in one example alone, as a guarantee for one example supposes.
    """
    flat, labels = originals.inputs.flatten(0, 1), originals.labels.flatten(0, 1)
    pool = (held_out.inputs, held_out.labels)
    chosen = case.modality.distractors(flat, labels, pool, count=case.settings.candidates, seed=case.seed)
    distractors = held_out.inputs[chosen]
    victims = len(originals.labels)
    places = _places(victims, chosen.shape[1] + 1, case.seed, originals.round)
    truths = Truths(
        originals=originals.inputs,
        labels=originals.labels,
        seen=originals.seen,
        rounds=(originals.round,) * victims,
        mean_input=held_out.mean_input,
        distractors=distractors,
        place=places,
    )
    found = _candidates(originals, (distractors, held_out.labels[chosen]), places, one_example=one_example)
    # Half precision could not hold the number of a token.
    kind = floating_type(case.public.model) if case.public.layout.text is None else torch.float32
    return RoundTruth(truths, Candidates(found[0].to(kind), found[1]))


def _places(victims: int, among: int, seed: int, number: int) -> Tensor:
    """Where each victim's original stands among its candidates: drawn, so that no order gives it away."""
    drawn = Streams.seeded(seed, range(victims), "place of the original", number).uniform(1)[:, 0]
    return (drawn * among).long().clamp_max(among - 1)


def _candidates(
    originals: Originals, others: tuple[Tensor, Tensor], places: Tensor, *, one_example: bool
) -> list[Tensor]:
    """The batches that a link test tells apart, and their labels: the original, and others made of its distractors.

    one_example: they differ in their first example and the rest is known.
    """
    victims, size = originals.labels.shape[:2]
    found = []
    for original, other in zip((originals.inputs, originals.labels), others, strict=True):
        # (V·B, M, ...) -> (V, M, B, ...)
        batches = other.reshape(victims, size, *other.shape[1:]).transpose(1, 2)
        if one_example:
            rest = original[:, None].expand(-1, batches.shape[1], *original.shape[1:])
            batches = torch.cat([batches[:, :, :1], rest[:, :, 1:]], dim=2)
        whole = torch.cat([original[:, None], batches], dim=1)  # the original first, then swapped to its place
        index = torch.arange(whole.shape[1]).repeat(victims, 1)
        rows = torch.arange(victims)
        index[rows, 0], index[rows, places] = places, index[rows, 0].clone()
        found.append(whole[rows[:, None], index])
    return found


def single(inputs: Inputs) -> Tensor:
    """Inputs as they are stored and compared: one tensor in single precision; of sentences, their tokens."""
    return tokens_of(inputs).float()
