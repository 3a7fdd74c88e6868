"""The likeliest sentence behind noisy rows: which token's row and which place's row are two views of one gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedveil.tasks.text_form import TextForm

LOOKED_AT = 40  # tokens at each place
SWEEPS = 40  # changes at most, each the best of those that one place or a turn of two allows
BY_CHANCE = 4.5  # standard deviations that the best of some ten thousand rows of noise reaches


def likeliest(table: Tensor, places: Tensor, noise: float, form: TextForm) -> tuple[int, ...]:
    """The tokens of one sentence from the gradients of the tokens (T, width) and of the places (P, width).

    The row of a token that stands at one place is that place's row, each with noise of its own; all other rows are
    noise. A pair explains |a + b|²/2 of both, so tokens are shared out among the places by these; of each length the
    sum beyond chance tells the likeliest. Tokens that are repeated are found afterwards, place by place.
    """
    width = table.shape[1]
    gain = (table.square().sum(1)[:, None] + places.square().sum(1)) / 2 + table @ places.T  # (T, P)
    before, behind = form.ends
    inner = gain.clone()
    inner[sorted(form.special)] = -math.inf
    best = inner.topk(min(LOOKED_AT, len(inner)), dim=0).indices
    expected, chosen = noise * width, noise * (width + BY_CHANCE * math.sqrt(2 * width))
    found: tuple[float, list[int]] | None = None
    for length in range(len(before) + len(behind) + 1, len(places) + 1):
        middle = range(len(before), length - len(behind))
        ends = [*enumerate(before), *((length - len(behind) + at, token) for at, token in enumerate(behind))]
        rows = best[:, list(middle)].flatten().unique()  # type: ignore[no-untyped-call]
        costs = -inner[rows][:, list(middle)].T
        tokens = [int(rows[each]) for each in linear_sum_assignment(costs.numpy())[1]]
        total = sum(float(gain[token, place]) - expected for place, token in ends)
        total += sum(float(gain[token, place]) - chosen for place, token in zip(middle, tokens, strict=True))
        if found is None or total > found[0]:
            found = total, tokens
    if found is None:
        return ()
    end = len(before) + len(found[1])
    own = places[len(before) : end]
    sharing, options = _Sharing(table, own), [each.tolist() for each in best[:, len(before) : end].T]
    loud = inner.amax(1).topk(min(len(own), len(inner))).indices  # as if all that stand out were there
    shares = torch.linalg.lstsq(table[loud].T, own.T).solution
    starts = (found[1], loud[shares.argmax(0)].tolist())
    return (*before, *max(sharing.improved(start, options) for start in starts)[1], *behind)


@dataclass(frozen=True, eq=False)
class _Sharing:
    """Which token stands at each place, by how well all rows then fit.

    Several places may have one token: its row is then the sum of theirs.
    """

    table: Tensor
    places: Tensor

    def explained(self, tokens: list[int]) -> float:
        """How much nearer the rows of tokens are to what their places add up to than to nothing; all have noise."""
        total = 0.0
        for token in set(tokens):
            at = [place for place, each in enumerate(tokens) if each == token]
            row = self.table[token]
            left = (row - self.places[at].sum(0)).square().sum() / (len(at) + 1)
            total += float(row.square().sum() - left)
        return total

    def improved(self, tokens: list[int], options: list[list[int]]) -> tuple[float, list[int]]:
        """The same after places changed their tokens, and places their turns, as long as that explains more."""
        made, best = list(tokens), self.explained(tokens)
        for _ in range(SWEEPS):
            before = best
            for changed in self._changes(made, options):
                gain = self.explained(changed)
                if gain > best * (1 + 1e-12):
                    made, best = changed, gain
            if best == before:
                break
        return best, made

    def _changes(self, tokens: list[int], options: list[list[int]]) -> Iterator[list[int]]:
        for place, own in enumerate(options):
            for token in dict.fromkeys((*own, *tokens)):
                yield [*tokens[:place], token, *tokens[place + 1 :]]
        for one, other in combinations(range(len(tokens)), 2):
            turned = list(tokens)
            turned[one], turned[other] = tokens[other], tokens[one]
            yield turned
