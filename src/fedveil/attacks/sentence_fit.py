"""How well sentences fit a gradient: does what they give to each layer lie in the span of its gradient?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from fedveil.attacks.span import Span
from fedveil.attacks.text_layers import LOOKED_AT, TextLayers
from fedveil.tasks.text_form import NO_TOKEN

EXACT = 1e-6  # what is outside of the span by less is in it, but for rounding
LEFT = 5e-6  # of the largest singular value: what rounding leaves of a gradient that was taken off
AT_ONCE = 2**24  # numbers of embeddings that are looked at together


@dataclass(frozen=True, eq=False)
class SentenceFit:
    """One victim's gradient, as the spans of the first few groups of linear layers."""

    layers: TextLayers
    spans: Mapping[int, Span]  # by the number of the group
    rows: Mapping[int, Tensor]  # the gradients themselves, (outputs, width), with a column more for biases

    @classmethod
    def of(
        cls,
        layers: TextLayers,
        gradient: Mapping[str, Tensor],
        weight: Mapping[str, Tensor] | None = None,
        *,
        left_of: SentenceFit | None = None,
    ) -> Self:
        """The spans of one gradient, whose entries are trusted by `weight`.

        left_of: the gradient is what is left of this one, and carries the errors of rounding that it had.
        """
        numbers = [number for number in range(1 + LOOKED_AT) if number < len(layers.groups)]
        spans, rows = {}, {}
        for number in numbers:
            group = layers.groups[number]
            kept = slice(None) if group.biased(gradient) else slice(-1)
            trust = None if weight is None else group.rows(weight)[:, kept]
            rows[number] = group.rows(gradient)[:, kept]
            least = 0.0 if left_of is None else LEFT * left_of.spans[number].largest
            spans[number] = Span.of(rows[number], trust, least=least)
        return cls(layers, spans, rows)

    @cached_property
    def clean(self) -> bool:
        """Whether there is no noise but rounding, so that the right sentences fit exactly.

        A defense of the data leaves a gradient without noise in which no token fits: its embeddings were moved. In a
        model whose attention is even, as before any training, tokens differ by little more than rounding: then the
        token that every sentence begins with is not found exactly either.
        """
        if not all(span.clean for span in self.spans.values()):
            return False
        before = self.layers.form.ends[0]
        begins = torch.tensor(before[:1]) if before else torch.arange(self.layers.form.entries)
        return float(self.outside(0, self.layers.first(begins, 1).double()).min()) < EXACT

    @property
    def rank(self) -> int:
        """Of the deepest span: about as many tokens as all sentences have together."""
        return max(span.rank for span in self.spans.values())

    def outside(self, number: int, given: Tensor) -> Tensor:
        """How much of what a group is given, (..., width), lies outside of its span."""
        if self.rows[number].shape[1] > given.shape[-1]:
            given = torch.cat([given, torch.ones_like(given[..., :1])], -1)
        return self.spans[number].outside(given)

    def explained(self, sentence: Tensor) -> float:
        """How much of the first group's gradient the tokens of a sentence (places,) explain, beyond what noise would.

        It grows with every right token, and not with a wrong one: by it sentences of different lengths are compared.
        """
        given = self.layers.given(sentence[None, sentence != NO_TOKEN], [0])[0][0].double()
        rows = self.rows[0].double()
        if rows.shape[1] > given.shape[1]:
            given = torch.cat([given, torch.ones_like(given[:, :1])], 1)
        basis = torch.linalg.qr(given.T).Q
        by_chance = len(rows) * basis.shape[1] * self.spans[0].noise ** 2
        return float((rows @ basis).square().sum()) - float(by_chance)

    def misfits(self, sentences: Tensor, *, exact: bool = False) -> Tensor:
        """The mean of what lies outside at every token of sentences (N, places), behind the first group: (N, places).

        exact: in double precision. Where there is no token it is 0.
        """
        numbers = [number for number in self.spans if number > 0]
        there = sentences != NO_TOKEN
        total = torch.zeros(sentences.shape, dtype=torch.float64 if exact else torch.float32)
        if not numbers:
            return total
        for number, given in zip(numbers, self.layers.given(sentences, numbers), strict=True):
            outside = self.outside(number, given.double() if exact else given)
            # Behind the last attention only the tokens have a gradient that the model's output is read from.
            if 2 * self.spans[number].rank < self.spans[0].rank:
                outside = torch.where(torch.arange(sentences.shape[1]) == 0, outside * there.sum(1, keepdim=True), 0.0)
            total += torch.where(there, outside, 0.0) / len(numbers)
        return total

    def misfit(self, sentences: Tensor, *, exact: bool = False) -> Tensor:
        """The mean over the tokens of each sentence: (N,)."""
        there = (sentences != NO_TOKEN).sum(1).clamp_min(1)
        return self.misfits(sentences, exact=exact).sum(1) / there


def pairs_outside(fits: Sequence[SentenceFit], tokens: Tensor, places: int) -> list[Tensor]:
    """How far each of some tokens at each place is outside of the first span of each victim: (tokens, places) each.

    All victims must have been sent the same weights.
    """
    layers = fits[0].layers
    step = max(1, AT_ONCE // (places * layers.form.width))
    parts: list[list[Tensor]] = [[] for _ in fits]
    for start in range(0, len(tokens), step):
        given = layers.first(tokens[start : start + step], places)
        for own, fit in zip(parts, fits, strict=True):
            own.append(fit.outside(0, given))
    return [torch.cat(own) for own in parts]
