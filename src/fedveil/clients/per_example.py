"""The sum of the clipped gradients of all examples, from one pass through the model where that can be known.

Only the sum is needed, never the gradients themselves. One forward and one backward pass of the whole batch tell what
each example adds to every parameter (`clients/graph.py`), so the lengths and the weighted sum follow by a product per
layer. That holds where the graph is understood and the model treats examples apart from each other. Whenever a graph is
new, the answer is compared with that of single backward passes, and those stay in use where the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedveil.clients.dropout import NotByExample, example_key
from fedveil.clients.graph import NotUnderstood, Reading, Site, by_example, read
from fedveil.clients.passes import Loss, OneClient, Passes, Tensors
from fedveil.clients.shares import MOST_KEPT, Several, Share
from fedveil.tasks.inputs import map_inputs
from fedveil.tree import HALF, Tree, at_least_single, clip_factors, clipped, matrix

# Products by layer round otherwise than a backward pass. So lengths count as so much longer: the bound must hold.
ROUNDING = {torch.float32: 4e-6, torch.float64: 1e-12}
# How far the two ways may differ, as a part of a gradient's length; in half precision both round.
ALIKE = {torch.float32: 1e-3, torch.float64: 1e-7}
ALIKE_HALF = 5e-2
MOST_TIED = 2**26  # entries of all examples' gradients in a parameter that is used several times: they are kept at once

Arrangement = tuple[bool, ...]  # of the rows at each site: see `by_example`


class Mixed(Exception):
    """An example's gradient depends on the others of its batch."""


@dataclass(frozen=True)
class ClippedSum:
    """Σᵢ gᵢ · min(1, bound/‖gᵢ‖) over the examples of a batch, and the mean of their losses."""

    bound: float
    name: ClassVar[str] = "clipped_sum"
    compiles: ClassVar[bool] = False  # what is computed follows from the graph of each batch

    def pure(self, passes: Passes, client: OneClient) -> Any:
        """There is none: a client at a time is faster than a stack of them."""
        raise NotImplementedError

    def plain(self, passes: Passes, client: OneClient) -> tuple[Tensors, Tensor]:
        """See `Quantity`."""
        together = _together(passes, client)
        if together is None:
            total, loss, _ = one_by_one(passes, client, self.bound)
            return total, loss
        if together.known:
            return together.clipped(self.bound)
        total, loss, lengths = one_by_one(passes, client, self.bound)
        same = together.proven(passes, total, lengths, self.bound)
        return together.clipped(self.bound) if same else (total, loss)


# ---- single backward passes ------------------------------------------------------------------------------------


def one_by_one(passes: Passes, client: OneClient, bound: float) -> tuple[Tensors, Tensor, Tensor]:
    """The clipped sum, the mean loss, and the length of every gradient, by a backward pass for each example."""
    total = {name: torch.zeros_like(weight) for name, weight in client.params.items()}
    lengths, losses = [], []
    for rows, some in _gradients(passes, client):
        each = Tree.stack(rows)
        lengths.append(each.length())
        for name, scaled in clipped(each, bound).items():
            total[name] += scaled.sum(0)
        losses += some
    return total, torch.stack(losses).mean(), torch.cat(lengths)


def _gradients(passes: Passes, client: OneClient) -> Iterator[tuple[list[Tensors], list[Tensor]]]:
    """The gradients of all examples, as many at a time as are kept at once, and their losses."""
    at_once = max(1, MOST_KEPT // max(sum(weight.numel() for weight in client.params.values()), 1))
    rows: list[Tensors] = []
    losses: list[Tensor] = []
    for i in range(len(client.targets)):
        single = map_inputs(lambda tensor, i=i: tensor[i : i + 1], client.inputs)  # type: ignore[misc]
        own = {name: example_key(key, i) for name, key in client.keys.items()}
        alone = OneClient(client.params, client.buffers, own, single, client.targets[i : i + 1])
        loss, _ = passes.in_precision(passes.loss_and_buffers, *alone)
        rows.append(passes.gradients(loss, client.params))
        losses.append(loss.detach())
        if len(rows) == at_once or i + 1 == len(client.targets):
            yield rows, losses
            rows, losses = [], []


# ---- all examples together --------------------------------------------------------------------------------------


def _together(passes: Passes, client: OneClient) -> Together | None:
    """One pass of the whole batch, read; None where that is of no use."""
    params, buffers, keys, inputs, targets = client
    size = len(targets)
    kinds = {weight.dtype for weight in params.values()}
    if size < 2 or not kinds <= ROUNDING.keys() or any(weight._backward_hooks for weight in params.values()):
        return None
    try:
        places = torch.arange(size, device=targets.device)
        own = {name: example_key(key, places) for name, key in keys.items()}
        with passes.precision():
            output, _ = passes.forward(params, buffers, own, inputs)
            losses = _losses(passes.loss_function, output, targets)
        reading = read(losses, params)
        known = passes.graphs.get(reading.signature, ())
        if known is None:
            return None
        found = Together(losses, reading, params, passes.loss_scale, max(ROUNDING[kind] for kind in kinds))
        found.differentiate(again=not known)
        try:
            found.arrange(known or None)
        except Mixed:
            passes.graphs[reading.signature] = None
            return None
    except (NotUnderstood, NotByExample):
        return None
    return found


def _losses(loss: Loss, output: Any, targets: Tensor) -> Tensor:
    """The loss of every example on its own: (B,)."""
    size = len(targets)
    if not all(isinstance(part, Tensor) and part.dim() and len(part) == size for part in tree_leaves(output)):
        raise NotUnderstood

    def alone(part: Any, target: Tensor) -> Tensor:
        return loss(tree_map(lambda tensor: tensor.unsqueeze(0), part), target.unsqueeze(0)).reshape(())

    try:
        return vmap(alone)(output, targets)
    except Exception:  # whatever foreign code raises that vmap does not serve
        parts = [tree_map(lambda tensor, i=i: tensor[i], output) for i in range(size)]
        return torch.stack([alone(part, target) for part, target in zip(parts, targets, strict=True)])


class Together:
    """One pass of a batch, with the gradients at the outputs of all operations that use parameters."""

    def __init__(self, losses: Tensor, reading: Reading, params: Tensors, scale: float, rounding: float) -> None:
        self.known = False  # whether the way to read such a graph was proven before
        self._losses, self._reading, self._params = losses, reading, params
        self._scale, self._rounding = scale, rounding
        self._slopes: list[Tensor | None] = []
        self._shares: dict[str, Share] = {}
        self._arrangement: Arrangement = ()
        self._sure = False
        self._half = False

    def differentiate(self, *, again: bool) -> None:
        """Take the gradients of all losses. `again`: others will be taken too."""
        self._slopes = self._reading.gradients(self._losses, torch.full_like(self._losses, self._scale), again=again)
        self._half = any(slope is not None and slope.dtype in HALF for slope in self._slopes)
        if self._scale != 1:
            self._slopes = [None if slope is None else at_least_single(slope) / self._scale for slope in self._slopes]

    @torch.no_grad()
    def arrange(self, known: Arrangement | None) -> None:
        """Find out which rows are whose, if that is not known of such a graph, and what each example adds."""
        self.known = known is not None
        self._arrangement, self._sure = (known, True) if known is not None else self._found_arrangement()
        shares: dict[str, list[Share]] = {}
        for site, minor in zip(self._reading.sites, self._arrangement, strict=True):
            slope = self._slopes[site.edge]
            if slope is not None:
                shares.setdefault(site.name, []).append(site.share(slope, len(self._losses), minor))
        for name, own in shares.items():
            if len(own) > 1 and len(self._losses) * self._params[name].numel() > MOST_TIED:
                raise NotUnderstood
            self._shares[name] = own[0] if len(own) == 1 else Several(own)

    @torch.no_grad()
    def lengths(self) -> Tensor:
        """The length of every example's gradient: (B,), in double precision."""
        squares = torch.zeros(len(self._losses), dtype=torch.float64, device=self._losses.device)
        for share in self._shares.values():
            squares += share.squares()
        return squares.sqrt()

    @torch.no_grad()
    def weighted(self, factors: Tensor) -> Tensors:
        """The sum of all gradients, each times its factor."""
        found = {}
        for name, weight in self._params.items():
            share = self._shares.get(name)
            found[name] = torch.zeros_like(weight) if share is None else share.weighted(factors.to(weight.dtype))
        return found

    @torch.no_grad()
    def clipped(self, bound: float) -> tuple[Tensors, Tensor]:
        """The clipped sum and the mean loss."""
        size = sum(weight.numel() for weight in self._params.values())
        double = all(weight.dtype == torch.float64 for weight in self._params.values())
        factors = clip_factors(self.lengths() * (1 + self._rounding), bound, size, double=double)
        return self.weighted(factors), self._losses.detach().mean()

    @torch.no_grad()
    def proven(self, passes: Passes, total: Tensors, lengths: Tensor, bound: float) -> bool:
        """Whether single backward passes came to the same. What is found out is kept for all graphs like this."""
        if not bool(torch.isfinite(lengths).all()):
            return False  # this batch tells nothing
        alike = max(ALIKE[weight.dtype] for weight in self._params.values())
        alike = ALIKE_HALF if self._half else alike
        found, _ = self.clipped(bound)
        apart = math.hypot(*[float(torch.linalg.vector_norm(found[n] - total[n])) for n in total])
        sent = torch.linalg.vector_norm(lengths.clamp_max(bound))
        same = bool(((self.lengths() - lengths).abs() <= alike * lengths).all()) and apart <= alike * float(sent)
        if self._sure or not same:
            passes.graphs[self._reading.signature] = self._arrangement if same else None
        return same

    def _found_arrangement(self) -> tuple[Arrangement, bool]:
        """Whose rows are whose at every site, and whether that is sure: where all is zero, nothing can be seen.

        With some losses left out, the rows of their examples must be zero, and no others. Else examples are mixed.
        """
        size = len(self._losses)
        chosen = torch.cos(torch.arange(size, dtype=torch.float64) ** 2 + 1) > 0  # of no simple pattern
        chosen = (chosen if chosen.any() and not chosen.all() else torch.arange(size) == 0).to(self._losses.device)
        parts = self._reading.gradients(self._losses, chosen * torch.full_like(self._losses, self._scale))
        arrangement, sure = [], True
        for site in self._reading.sites:
            whole, part = self._slopes[site.edge], parts[site.edge]
            if whole is None or part is None:
                arrangement.append(False)
                continue
            fitting = [minor for minor in (False, True) if _fits(site, whole, part, chosen, minor)]
            if not fitting:
                raise Mixed
            arrangement.append(fitting[0])
            sure = sure and bool(whole.any()) and (len(fitting) == 1 or len(site.rows(whole)) == size)
        return tuple(arrangement), sure


def _fits(site: Site, whole: Tensor, part: Tensor, chosen: Tensor, minor: bool) -> bool:
    """Whether the rows of the chosen examples, and only they, have a gradient where the others' losses are left out."""
    among_all, among_some = (
        by_example(matrix(site.rows(slope)).ne(0).any(1), len(chosen), minor) for slope in (whole, part)
    )
    return torch.equal(among_some, among_all & chosen[:, None])
