"""Moves of tokens within a sentence: what a search by gradients, which changes each place by itself, hardly finds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DRAWS = 5  # numbers that a move is made of
SWAP, MOVE, MOVE_SPAN, PREFIX_TO_END = range(4)


def moved(kind: int, size: int, draws: Sequence[float]) -> list[int]:
    """Which of `size` tokens stand where after a move (LAMP): each of them once, whatever the draws in [0, 1) are.

    >>> moved(SWAP, 4, (0.0, 0.99, 0.0)), moved(MOVE, 4, (0.0, 0.99, 0.0))
    ([3, 1, 2, 0], [1, 2, 3, 0])
    >>> moved(MOVE_SPAN, 4, (0.0, 0.49, 0.99)), moved(PREFIX_TO_END, 4, (0.5, 0.0, 0.0))
    ([2, 3, 0, 1], [2, 3, 0, 1])
    """
    order = list(range(size))
    if size < 2:
        return order
    first, second = (int(draw * size) for draw in draws[:2])
    if kind == SWAP:
        order[first], order[second] = order[second], order[first]
        return order
    if kind == PREFIX_TO_END:
        cut = 1 + int(draws[0] * (size - 1))
        return order[cut:] + order[:cut]
    start, stop = (first, first) if kind == MOVE else (min(first, second), max(first, second))
    span, rest = order[start : stop + 1], order[:start] + order[stop + 1 :]
    place = int((draws[1] if kind == MOVE else draws[2]) * (len(rest) + 1))
    return rest[:place] + span + rest[place:]


def rearrangements(stretches: Sequence[tuple[int, int]], places: int, draws: Tensor) -> Tensor:
    """Orders (K, B·places) of a batch's places, flat: in each, one move was made in one of its sentences.

    stretches: where the tokens of each sentence stand that may move. draws: (K, DRAWS) in [0, 1). The first order
    leaves all as it is.
    """
    found = torch.arange(len(stretches) * places).repeat(len(draws), 1)
    for row, (which, kind, *rest) in enumerate(draws.tolist()):
        sentence = int(which * len(stretches))
        start, stop = (sentence * places + end for end in stretches[sentence])
        if row:
            found[row, start:stop] = start + torch.tensor(moved(int(kind * 4), stop - start, rest), dtype=torch.long)
    return found
