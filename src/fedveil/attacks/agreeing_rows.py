"""The sentence behind rows of which some entries are as they were, and the others say nothing: masks and decoys."""

from __future__ import annotations

from itertools import combinations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedveil.tasks.text_form import TextForm

ALIKE = 1e-4  # entries agree if they differ by less than this share of themselves
ENOUGH = 0.5  # of the most entries that agree anywhere: a token stands at one place if so many do
REPEATS = 3  # places, at most, that a token is looked for at together


def by_agreement(table: Tensor, places: Tensor, form: TextForm) -> tuple[int, ...] | None:
    """The tokens of one sentence from the gradients of the tokens (T, width) and of the places (P, width).

    Rows of tokens that are not in the sentence are zero, but for decoys: those with more entries are of tokens that
    are, and so it is with places. The row of a token is that of its place, entry by entry, where both were kept. None
    where the rows of most tokens have no zeros, as under noise.
    """
    there = (table != 0).double().mean(1)
    usual, most = float(there.median()), float(there.max())
    least = (usual + most) / 2
    used = (there > least).nonzero().flatten()
    filled = ((places != 0).double().mean(1) > least).nonzero().flatten()
    before, behind = form.ends
    length = int(filled[-1]) + 1 if len(filled) else 0
    if usual == 1 or length <= len(before) + len(behind):
        return None
    rows, own = table[used], places[:length]
    made = _placed(rows, own)
    inner = [place for place, token in enumerate(used.tolist()) if token not in form.special]
    found = []
    for place in range(length):
        token = made.get(place)
        if token is None or token not in inner:
            agreeing = [_agreeing(rows[each], own[place]) for each in inner]
            token = inner[max(range(len(inner)), key=agreeing.__getitem__)] if inner else 0
        found.append(int(used[token]))
    middle = found[len(before) : length - len(behind)]
    return (*before, *middle, *behind)


def _placed(rows: Tensor, places: Tensor) -> dict[int, int]:
    """Which row stands at each place: first those that stand at one place alone, then those that stand at several."""
    counts = torch.stack([_agreeing_each(row, places) for row in rows])
    enough = ENOUGH * float(counts.max())
    pairs = zip(*linear_sum_assignment(counts.numpy(), maximize=True), strict=True)
    made = {int(place): int(row) for row, place in pairs if float(counts[row, place]) > enough}
    for row in range(len(rows)):
        free = [place for place in range(len(places)) if place not in made]
        if row in made.values():
            continue
        several = [some for size in range(2, REPEATS + 1) for some in combinations(free, size)]
        counted = [_agreeing(rows[row], places[list(some)].sum(0)) for some in several]
        if counted and max(counted) > 0:
            made |= dict.fromkeys(several[counted.index(max(counted))], row)
    return made


def _agreeing(one: Tensor, other: Tensor) -> int:
    return int(_agreeing_each(one, other[None])[0])


def _agreeing_each(one: Tensor, others: Tensor) -> Tensor:
    """In how many entries a row agrees with each of some others; what is zero was not sent."""
    return ((one != 0) & ((one - others).abs() <= ALIKE * one.abs())).double().sum(1)
