"""The inputs of a linear layer with a bias from its gradient rows: linear algebra alone, no model.

Row i of [dW | db] is Σ_b δ_bi·(x_b, 1): the rows lie in the span of the B inputs, the columns in that of the B vectors
δ_b. A row with one active example is a multiple of that input. Behind ReLU every δ_b is zero wherever example b is
inactive, and a mixture of several vectors δ_b is zero on fewer rows than each of them. So among all directions of the
column space the sparsest ones are the δ_b, and their dual basis holds the inputs (SPEAR's idea).

The sparsest directions are found as in decoding: invert r random rows of the rank-r factor; each column of the
inverse is a direction that vanishes on r − 1 of them. Keep those that vanish on many more rows, fit each anew on all
rows where it vanishes, and stop when r independent ones give inputs within the valid range.

Where a loss of two classes follows one hidden layer, all δ_b agree but for their size on the units that both activate,
and mixtures can be sparser than they are. But there something simpler helps: divided by that common profile, two rows
that the same examples activate, but for one, differ by a multiple of that one input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

WIDTH = 5.0  # a value within so many standard deviations of its noise counts as zero
MARGIN = 3  # rows on which a sparse direction must vanish beyond those that it was made from
EDGE = 3.0  # a singular value counts as signal from so many times the largest that noise has
ALIKE = 0.9999  # cosine from which two directions are the same
DEPENDENT = 1e-4  # share of a direction outside the span of others below which it is one of their mixtures
SLACK = 0.1  # how far inputs may lie outside the valid range, in parts of it: data defenses shift them
ROUNDING = 1e-3  # how far they may for rounding alone
PREFERENCE = 0.7  # how much sets of rows prefer those that few known examples activate, or many
SPARSE_FIT = 30.0  # how much less sure rows with few trusted entries are than those entries
SWEEPS = 60  # rounds of the robust fit
WHOLE = 0.1  # how far a place that holds 0 or 1 may be off both
MOST_VALUES = 2**24  # of the differences of rows
MOST_GROUPS = 256  # inputs that pairs of rows agree on
GRID = 0.02  # two inputs are the same where no value differs by more, in parts of the range


@dataclass(frozen=True, eq=False)
class Span:
    """The part of gradient rows that inputs explain: rows ≈ spread[:, None]·(left @ right).

    Divided by `spread` every entry has noise of size 1, and so has every entry of left @ q for a unit vector q.
    """

    left: Tensor  # (n, r)
    right: Tensor  # (r, m), orthonormal
    spread: Tensor  # (n,) size of the noise in each row

    @property
    def rank(self) -> int:
        """How many inputs the rows tell apart."""
        return len(self.right)


@dataclass(frozen=True, eq=False)
class LinearInputs:
    """Inputs and the vectors δ with which they make up the rows: rows ≈ effects.T @ [inputs | 1]."""

    inputs: Tensor  # (r, d)
    effects: Tensor  # (r, n)
    noise: Tensor  # (r,) standard deviation of an entry of each input
    complete: bool  # whether a sparse direction was found for every input; if not, the inputs are mixtures


def span_of(rows: Tensor, most: int, noise: float) -> Span:
    """The span of gradient rows (n, m), of rank `most` or less, with the noise of each row read off the rest.

    noise: the least standard deviation of an entry, relative to its row's root mean square (rounding).
    """
    size = rows.norm(dim=1) / rows.shape[1] ** 0.5
    most = min(most, *rows.shape)
    u, s, v = torch.linalg.svd(rows, full_matrices=False)
    rest = rows - (u[:, :most] * s[:most]) @ v[:most]
    beyond = rest.norm(dim=1) / max(rows.shape[1] - most, 1) ** 0.5
    spread = torch.maximum(beyond, noise * size)
    spread = torch.where(size > 0, spread, 1.0)  # a unit that no example activates
    u, s, v = torch.linalg.svd(rows / spread[:, None], full_matrices=False)
    edge = EDGE * (rows.shape[0] ** 0.5 + rows.shape[1] ** 0.5)
    rank = max(1, int((s[:most] > edge).sum()))
    left = torch.where((size > 0)[:, None], u[:, :rank] * s[:rank], 0.0)
    return Span(left, v[:rank], spread)


class Valid(NamedTuple):
    """What inputs may be: the valid range, (d,) each, and which places hold 0 or 1 alone, as those of categories."""

    low: Tensor
    high: Tensor
    whole: Tensor | None = None


def recover_inputs(span: Span, box: Valid | None, tries: int, generator: torch.Generator) -> LinearInputs:
    """The inputs behind a span. Of a span of several inputs without sparse directions, mixtures of them.

    tries: at most so many sets of rows are inverted.
    """
    if span.rank == 1:
        return _inputs(span, torch.ones_like(span.left[:1, :1]), complete=True)

    def beyond(directions: Tensor) -> float:
        found = _inputs(span, directions, complete=True)
        return outside(found.inputs, box, (WIDTH * found.noise[:, None]).clamp(max=SLACK))

    live = span.left[span.left.norm(dim=1) > WIDTH]  # zeros of units that no example activates tell nothing
    found = sparse_directions(live, beyond, tries, generator)
    if found is None:
        return _inputs(span, torch.eye(span.rank).to(span.left), complete=False)
    return _inputs(span, found, complete=True)


def outside(inputs: Tensor, box: Valid | None, slack: Tensor | float = 0.0) -> float:
    """How far inputs lie outside the valid range and some slack at most, in parts of the range."""
    return float(_beyond(inputs, box, slack).amax().clamp_min(0)) if len(inputs) else 0.0


def _beyond(inputs: Tensor, box: Valid | None, slack: Tensor | float = 0.0) -> Tensor:
    """How far every value lies outside. A place that holds 0 or 1 alone is outside where it is clearly neither."""
    if box is None:
        return torch.zeros_like(inputs)
    beyond = (torch.maximum(box.low - inputs, inputs - box.high) - slack) / (box.high - box.low).clamp_min(1e-300)
    if box.whole is not None:
        between = (inputs - inputs.round()).abs() - slack - WHOLE
        beyond = torch.where(box.whole, torch.maximum(beyond, between), beyond)
    return torch.nan_to_num(beyond, nan=torch.inf)


def lone_rows(rows: Tensor, box: Valid | None) -> Tensor:
    """What would be the input of every row if one example alone were active in it; those within the valid range."""
    inputs = rows[:, :-1] / rows[:, -1:]
    return inputs[torch.isfinite(inputs).all(1) & (_beyond(inputs, box).amax(1) < SLACK)]


def lone_differences(rows: Tensor, profile: Tensor, box: Valid | None, generator: torch.Generator) -> Tensor:
    """What would be the input if two rows differed in one active example alone, for pairs of rows (n, m).

    Those within the valid range that several pairs agree on, those that most agree on first. Of more pairs than there
    is room for, some are drawn.

    profile: what the vectors δ are multiples of wherever they do not vanish, (n,).
    """
    scaled = (rows / profile[:, None])[rows.any(1)]
    pairs = torch.combinations(torch.arange(len(scaled)))
    room = max(1, MOST_VALUES // rows.shape[1])
    if len(pairs) > room:
        pairs = pairs[torch.randperm(len(pairs), generator=generator)[:room]]
    apart = scaled[pairs[:, 0]] - scaled[pairs[:, 1]]
    inputs = apart[:, :-1] / apart[:, -1:]
    inputs = inputs[torch.isfinite(inputs).all(1) & (_beyond(inputs, box).amax(1) < SLACK)]
    size = inputs.std(0) if box is None else box.high - box.low
    grid = (inputs / (GRID * size)).round()
    _, groups, counts = torch.unique(grid, dim=0, return_inverse=True, return_counts=True)
    often = counts.argsort(descending=True, stable=True)[: int((counts > 1).sum())]
    members = (inputs[groups == group].median(0).values for group in often[:MOST_GROUPS])
    return torch.stack(list(members)) if len(often) else inputs[:0]


def _inputs(span: Span, directions: Tensor, complete: bool) -> LinearInputs:
    """The dual basis of directions (r, r): inputs whose last entry, the bias's, is 1."""
    values = span.left @ directions.T
    if span.rank > 1 and complete:
        values = torch.where(_vanishing(values), 0.0, values)
    dual = torch.linalg.lstsq(values, span.left).solution @ span.right  # (r, m)
    last = dual[:, -1]
    # The bias entry's own noise: where it is larger than the entry, the inputs shrink toward 0 and do not explode.
    doubt = torch.linalg.pinv(values).norm(dim=1)
    scale = last / (last.square() + doubt.square()).clamp_min(1e-300)
    return LinearInputs(
        inputs=dual[:, :-1] * scale[:, None],
        effects=(values * span.spread[:, None] * last).T,
        noise=doubt * scale.abs(),
        complete=complete,
    )


# ---- sparse directions -----------------------------------------------------------------------------------------


def sparse_directions(
    left: Tensor, beyond: Callable[[Tensor], float], tries: int, generator: torch.Generator
) -> Tensor | None:
    """r independent unit vectors, the rows of (r, r), on which left (n, r) vanishes most often; None if not found.

    `left` has noise of size 1. `beyond` says how far the inputs of a set of directions lie outside the valid range:
    the first set that lies within is taken, else, in the end, the one that is nearest to it.
    """
    count, rank = left.shape
    if count < rank or 2**rank > rank * tries:  # too few tries to see even one, if half of the entries are zero
        return None
    pool, last = left.new_zeros(0, rank), left.new_zeros(0, rank)
    best: tuple[float, Tensor | None] = (SLACK, None)
    tries = min(tries, 64 * 2**rank // rank)  # where half of the entries are zero, this is enough many times over
    size, tried = 32, 0
    while tried < tries:
        # Those that vanish on far fewer rows than the sparsest are mixtures; the longer it takes, the more are let in.
        least = (0.6 - 0.5 * tried / tries) * float(_zeros(left, pool[:1]).sum())
        index = _sets_of_rows(left, pool[:rank], size, generator)
        pool = _merged(left, pool, *_vanishing_directions(left, index, max(least, rank - 1 + MARGIN)))
        chosen = _independent(left, pool)
        if len(chosen) == rank and not torch.equal(chosen, last):
            last = chosen
            pure = unmixed(left, chosen)
            best = min(best, (beyond(pure), pure), key=lambda pair: pair[0])
            if best[0] < ROUNDING:
                break
            pool = _merged(left, pool, pure, _vanishing(left @ pure.T).T)
        tried += size
        size = min(2 * size, max(32, 2**20 // (count * rank)))
    return best[1]


def _sets_of_rows(left: Tensor, known: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Random sets of r rows: (size, r).

    Examples are alike: units that few of those known so far activate are mostly inactive for the next one too, and a
    set finds it if it is inactive on all rows but one. So each set prefers such rows to its own degree, or the
    opposite, for examples that are unlike the others.
    """
    busy = (~_vanishing(left @ known.T)).double().sum(1).cpu()
    busy = (busy - busy.mean()) / (busy.std() + 1e-300) if len(known) else torch.zeros(len(left)).double()
    taste = PREFERENCE * torch.randn(size, 1, generator=generator)
    gumbel = -torch.log(-torch.log(torch.rand(size, len(left), generator=generator, dtype=torch.float64)))
    return (gumbel - taste * busy).topk(left.shape[1]).indices.to(left.device)


def _vanishing_directions(left: Tensor, index: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Those directions that vanish on all but one of a set's r rows, and on `least` rows in all, sparsest first.

    Returns them, (K, r), and where they vanish, (K, n).
    """
    rank = left.shape[1]
    inverse = torch.linalg.inv_ex(left[index]).inverse  # (T, r, r)
    values = left @ inverse  # (T, n, r)
    # The noise of the r rows is amplified by what the others are made of them.
    noise = WIDTH * (1 + values.square().sum(2, keepdim=True)).sqrt() * inverse.norm(dim=1, keepdim=True)
    typical = values.square().mean(1, keepdim=True).sqrt()
    by_chance = (noise / typical).clamp(max=1).sum(1)
    zero = values.abs() <= noise
    score = torch.nan_to_num(zero.sum(1) - by_chance, nan=-torch.inf)  # (T, r)
    order = score.flatten().argsort(descending=True)[: int((score >= least).sum())]
    which, column = order // rank, order % rank
    return torch.nn.functional.normalize(inverse[which, :, column], dim=1), zero[which, :, column]


def _merged(left: Tensor, pool: Tensor, found: Tensor, zero: Tensor) -> Tensor:
    """The pool with those of the found directions that are new, each fitted to where it vanishes; sparsest first."""
    old, new = _values(left, pool), _values(left, found)
    waiting = _unlike(new, old).nonzero().flatten()[: 16 * left.shape[1]]
    while len(waiting):
        fitted = _fitted(left, zero[waiting[0]])
        waiting = waiting[1:]
        if fitted is not None:
            value = _values(left, fitted[None])
            waiting = waiting[_unlike(new[:, waiting], value)]
            if bool(_unlike(value, old)):
                pool, old = torch.cat([pool, fitted[None]]), torch.cat([old, value], 1)
    return pool[_zeros(left, pool).argsort(descending=True, stable=True)]


def _unlike(new: Tensor, old: Tensor) -> Tensor:
    """Which of some directions are not among others, given the unit vectors of their values."""
    return ((new.T @ old).abs() < ALIKE).all(1)


def _values(left: Tensor, directions: Tensor) -> Tensor:
    return torch.nn.functional.normalize(left @ directions.T, dim=0)


def _fitted(left: Tensor, zero: Tensor) -> Tensor | None:
    """The direction that vanishes on these rows and all that follow; None if they are no more than chance gives."""
    for _ in range(4):
        if int(zero.sum()) < left.shape[1] - 1 + MARGIN:
            return None
        direction: Tensor = torch.linalg.svd(left[zero], full_matrices=False).Vh[-1]
        before, zero = zero, _vanishing(left @ direction)
        if torch.equal(before, zero):
            break
    return direction


def _vanishing(values: Tensor) -> Tensor:
    return values.abs() <= WIDTH


def _zeros(left: Tensor, directions: Tensor) -> Tensor:
    """On how many rows each direction vanishes."""
    return _vanishing(left @ directions.T).sum(0)


def _independent(left: Tensor, pool: Tensor) -> Tensor:
    """The first independent directions of the pool."""
    basis = left.new_zeros(len(left), 0)
    chosen = []
    for direction in pool:
        value = left @ direction
        least = max(DEPENDENT * float(value.norm()), 4 * WIDTH * len(left) ** 0.5)  # above the noise
        for _ in range(2):  # once is not orthogonal enough
            value = value - basis @ (basis.T @ value)
        if float(value.norm()) > least:
            basis = torch.cat([basis, torch.nn.functional.normalize(value, dim=0)[:, None]], 1)
            chosen.append(direction)
    return torch.stack(chosen) if chosen else pool[:0]


def unmixed(left: Tensor, directions: Tensor) -> Tensor:
    """Take off each direction the multiple of another that makes it vanish on more rows, as long as there is one.

    Two examples that are mostly active together leave mixtures: these vanish where both are inactive. The multiple is
    the ratio of the two that occurs most often.
    """
    directions = directions.clone()
    changed = True
    while changed:
        changed = False
        for k in range(len(directions)):
            values = left @ directions.T  # (n, r)
            own, count = values[:, k], int(_vanishing(values[:, k]).sum())
            others = (values[:, other] for other in range(len(directions)) if other != k)
            zero = max((_most_zeros(own, other) for other in others), key=lambda zero: int(zero.sum()))
            fitted = _fitted(left, zero) if int(zero.sum()) >= count + MARGIN else None
            if fitted is not None and int(_zeros(left, fitted[None])) > count:
                directions[k], changed = fitted, True
    return directions


def _most_zeros(own: Tensor, other: Tensor) -> Tensor:
    """Where own − t·other vanishes for that t for which it does so most often."""
    ratios = own / torch.where(_vanishing(other), torch.inf, other)  # the t for which each row vanishes
    noise = WIDTH * (1 + ratios.square()).sqrt()
    zero = (own - ratios[:, None] * other).abs() <= noise[:, None]
    return zero[zero.sum(1).argmax()]


# ---- rows of which some entries are not to be trusted ------------------------------------------------------------


def trusted_rows(rows: Tensor, trust: Tensor, rank: int, precision: float) -> tuple[Tensor, float]:
    """Rows of that rank which fit the trusted entries, and the size of the noise that is left, relative to theirs.

    Least squares weighted by the trust, alternating between the two factors. Entries that do not fit lose their weight
    (Cauchy's): where most of the trusted entries are exact, what they have in common is found exactly.
    """
    rank = min(rank, *rows.shape)
    telling = trust * (rows != 0)  # zeros of units that no example activates always fit: they say nothing of the noise
    if not bool(telling.any()):
        return torch.zeros_like(rows), precision
    size = float(rows[telling > 0].square().mean().sqrt())
    right = torch.linalg.svd(rows * trust, full_matrices=False).Vh[:rank]
    weight, scale = trust, size
    for _ in range(SWEEPS):
        left = _weighted_fit(rows, weight, right)
        left = torch.linalg.qr(left).Q
        right = _weighted_fit(rows.T, weight.T, left.T).T
        off = (rows - left @ right).abs()
        # Slowly: entries that lose their weight too soon do not get it back.
        before, scale = scale, max(min(scale, _weighted_median(off, telling)), scale / 2, precision * size)
        weight = trust / (1 + (off / (3 * scale)).square())
        if scale > (1 - 1e-4) * before:
            break
    return left @ right, SPARSE_FIT * scale / size


def _weighted_fit(rows: Tensor, weight: Tensor, right: Tensor) -> Tensor:
    """The left factor (n, r) of each row's weighted least squares; rows without weight get zeros."""
    rank = len(right)
    squares = (right[:, None] * right[None]).flatten(0, 1)  # (r·r, m)
    normal = (weight @ squares.T).reshape(-1, rank, rank)
    ridge = (1e-12 * normal.diagonal(dim1=1, dim2=2).sum(1)).clamp_min(1e-300)
    normal = normal + ridge[:, None, None] * torch.eye(rank).to(normal)
    solved: Tensor = torch.linalg.solve(normal, ((weight * rows) @ right.T)[:, :, None])
    return solved[:, :, 0]


def _weighted_median(values: Tensor, weight: Tensor) -> float:
    values, order = values.flatten().sort()
    total = weight.flatten()[order].cumsum(0)
    return float(values[torch.searchsorted(total, total[-1] / 2).clamp(max=len(values) - 1)])
