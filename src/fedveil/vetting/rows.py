"""Signs of a malicious server in the rows of one layer: what an honest layer practically never has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedveil.streams import Streams

SAME = 0.999  # cosine from which on two rows are near-duplicates; random rows of 8 entries do not come that close
FEWEST_COLUMNS = 8
MOST_ROWS = 2048  # of a layer that are compared with each other
FEWEST = 4  # rows that make a sign
TRAP_COLUMNS = 32  # with fewer, rows of as many negative as positive entries are common
RATIO_SPREAD = 1e-3  # of paired entries of one row; for random entries it is percents
UNLIKELY = 1e-9


class Row(NamedTuple):
    """A sign and its words."""

    kind: str
    text: str


def row_signs(weight: Tensor, bias: Tensor | None) -> Iterator[Row]:
    """What is odd about the rows of a weight, each row the entries behind one output."""
    rows = weight.detach().flatten(1).double().cpu()
    if len(rows) < FEWEST or rows.shape[1] < FEWEST_COLUMNS:
        return
    lengths = rows.norm(dim=1)
    dead = lengths <= 1e-9 * lengths.max()
    if FEWEST <= int(dead.sum()) < len(rows):
        yield Row("dead rows", f"{int(dead.sum())} of {len(rows)} rows are zero")
    living = (~dead).nonzero().flatten()
    if len(living) > MOST_ROWS:  # a server must not know which ones are looked at
        living = living[Streams.secure(1).permutation(len(living))[0][:MOST_ROWS].sort().values]
    group = _duplicates(rows[living])
    if len(group) >= FEWEST:
        yield _duplicate_sign(living[group], None if bias is None else bias.detach().double().cpu(), len(rows))
    else:
        yield from _traps(rows[living])


def _duplicates(rows: Tensor) -> Tensor:
    """The places of the largest set of rows that all point the same way as one of them, or opposite to it."""
    if len(rows) < FEWEST:
        return torch.empty(0, dtype=torch.long)
    unit = normalize(rows, dim=1)
    alike = (unit @ unit.T).abs() >= SAME
    return alike[alike.sum(1).argmax()].nonzero().flatten()


def _duplicate_sign(group: Tensor, bias: Tensor | None, total: int) -> Row:
    told = f"{len(group)} of {total} rows are near-duplicates"
    if bias is None or bias.dim() != 1 or len(bias) != total:
        return Row("near-duplicate rows", told)
    own = bias[group]
    if len(set(own.tolist())) < len(own):
        return Row("near-duplicate rows", told)
    steps = own.diff()
    order = "rise or fall steadily" if bool((steps > 0).all() or (steps < 0).all()) else "all differ"
    return Row("imprint block", f"{told} whose biases {order}, so that single inputs can be told apart")


def _traps(rows: Tensor) -> Iterator[Row]:
    """Trap weights: as many negative as positive entries in every row, the ones a multiple of the others."""
    count, columns = rows.shape
    if columns < TRAP_COLUMNS or count < 2 * FEWEST:
        return
    halved = (rows < 0).sum(1) == (rows > 0).sum(1)
    split = rows[halved]
    if len(split):
        negative = split.clamp_max(0).neg().sort(dim=1, descending=True).values
        positive = split.clamp_min(0).sort(dim=1, descending=True).values
        half = int((negative > 0).sum(1).min())
        ratio = positive[:, :half] / negative[:, :half]
        paired = int((ratio.std(dim=1) <= RATIO_SPREAD * ratio.mean(dim=1)).sum()) if half > 1 else 0
        if paired >= max(FEWEST, count // 4):
            yield Row("trap weights", f"in {paired} of {count} rows the positive entries are the negative ones, scaled")
            return
    chance = math.sqrt(2 / (math.pi * columns)) if columns % 2 == 0 else 0.0
    if chance and len(split) >= count / 2 and _tail(len(split), count, chance) < UNLIKELY:
        yield Row("trap weights", f"{len(split)} of {count} rows have exactly as many negative as positive entries")


def _tail(found: int, count: int, chance: float) -> float:
    """A bound on the probability of so many successes or more (Chernoff)."""
    share = found / count
    if share <= chance:
        return 1.0
    other = (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
    return math.exp(-count * (share * math.log(share / chance) + other))
