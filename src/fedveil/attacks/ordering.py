"""The order of examples in local epochs, which an attacker does not know and can look for.

Which examples shared a batch, and which came first, decides at which weights each gradient was taken. At usual rates
that makes up several percent of an update: far more than inputs that are nearly right leave unexplained. So inputs and
order are looked for in turns: inputs first as if every step took the mean gradient, which knows no order; then the
order in which these inputs explain the update best; then better inputs in that order; and so on. A search among the
pictures of a generator begins with likely ones, and so with their order: where steps are large, the mean gradient leads
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import vmap

from fedveil.attacks.latent import Latents
from fedveil.attacks.match import MATCHES
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.attacks.scene import LocalSteps
from fedveil.streams import Streams
from fedveil.tree import size_in_bytes

ROUNDS = 4  # parts of a phase, with a search before each
DRAWN = 32  # random orders, of which the best are where the first search begins
STARTS = 4  # so many of them
SWAPS = 256  # exchanges that are tried in a sweep, at most
SWEEPS = 16  # of a search, at most
GAIN = 1e-3  # a sweep that lowers the cost by less than this share is the last one
MOST_BYTES = 64 * 2**20  # of updates that are made at a time

Cost = Callable[[Tensor], Tensor]  # of orders (M, epochs, B): (M,)


def with_search(recipe: Recipe, local: LocalSteps | None) -> Recipe:
    """The recipe with as many steps, between which the order of the local steps is looked for if it is not known."""
    if local is None or local.order != "searched" or not local.ordered:
        return recipe
    return replace(recipe, tries=tuple(_searching(phases) for phases in recipe.tries))


def _searching(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    first, *others = [part for phase in phases for part in _parts(phase)]
    # There is nothing to go by before the first, unless it begins with pictures that are likely.
    likely = isinstance(first.candidate, Latents)
    return (replace(first, reorders=likely), *(replace(part, reorders=True) for part in others))


def _parts(phase: Phase) -> list[Phase]:
    rounds = 1 if phase.reweighs else min(ROUNDS, phase.steps)  # those that reweigh are parts already
    shares = [phase.steps // rounds + (number < phase.steps % rounds) for number in range(rounds)]
    return [replace(phase, steps=share) for share in shares]


def found_orders(
    problem: Problem, inputs: Tensor, labels: Tensor, update: Callable[..., dict[str, Tensor]], *, stacked: bool
) -> Tensor:
    """The order (V, epochs, B) in which the inputs (V, B, ...) found so far explain each victim's update best.

    update: what a client would have shared, of (params, buffers, inputs, labels, order). stacked: it takes `vmap`.
    """
    assert problem.local is not None
    found = []
    for v in range(problem.count):  # one by one: how many orders are tried depends on the victim
        streams = problem.streams.rows([v]).fold("order")
        known = None if problem.order is None else problem.order[v].cpu()
        cost = _cost(problem.rows([v]), inputs[v].detach(), labels[v].detach(), update, stacked=stacked)
        found.append(searched(cost, problem.local, streams, known))
    return torch.stack(found).to(inputs.device)


def _cost(
    problem: Problem, inputs: Tensor, labels: Tensor, update: Callable[..., dict[str, Tensor]], *, stacked: bool
) -> Cost:
    """How far the update of one victim's inputs in some orders is from the observed one."""
    target, weight, match = problem.target.row(0), problem.weight.row(0), MATCHES["relative-l2"]
    params, aim = problem.params.row(0), match.aim(target, weight)
    most = max(1, MOST_BYTES // max(size_in_bytes(target.values()), 1))

    def one(order: Tensor) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in problem.buffers.row(0).items()}  # batch norm moves them
        return match.of(update(params, buffers, inputs, labels, order), aim, weight)

    def cost(orders: Tensor) -> Tensor:
        orders = orders.to(inputs.device)
        if stacked:
            parts = [vmap(one)(part).detach() for part in torch.split(orders, most)]
        else:
            parts = [one(order).detach()[None] for order in orders]
        return torch.nan_to_num(torch.cat(parts).double().cpu(), nan=torch.inf)

    return cost


def searched(cost: Cost, local: LocalSteps, streams: Streams, known: Tensor | None = None) -> Tensor:
    """An order (epochs, B) of low cost: exchange examples between batches as long as that lowers it.

    known: where the search begins; else at the best of some that are drawn, at several of them in turn. streams: one
    stream.
    """
    begin = _drawn(local, streams) if known is None else known[None]
    costs = cost(begin)
    found = [
        _descended(cost, local, streams, begin[start], float(costs[start]))
        for start in costs.argsort(stable=True)[:STARTS].tolist()
    ]
    return min(found, key=lambda each: each[1])[0]


def _descended(cost: Cost, local: LocalSteps, streams: Streams, best: Tensor, lowest: float) -> tuple[Tensor, float]:
    """Where exchanges lead from an order of this cost, and the cost there."""
    moves = _exchanges(local)
    for _ in range(SWEEPS if len(moves) else 0):
        few = moves
        if len(moves) > SWAPS:
            few = moves[streams.permutation(len(moves))[0, :SWAPS].sort().values]
        costs = cost(_exchanged(best, few))
        tried = _together(best, few[_best_of_epochs(few[:, 0] // local.examples, costs, lowest)])
        if not len(tried):
            break
        costs = cost(tried)
        if not float(costs.min()) < lowest * (1 - GAIN):
            break
        best, lowest = tried[costs.argmin()], float(costs.min())
    return best, lowest


def _drawn(local: LocalSteps, streams: Streams) -> Tensor:
    """Random orders, (DRAWN, epochs, B)."""
    walks = [streams.permutation(local.examples)[0] for _ in range(DRAWN * local.epochs)]
    return torch.stack(walks).reshape(DRAWN, local.epochs, local.examples)


def _best_of_epochs(epochs: Tensor, costs: Tensor, lowest: float) -> list[int]:
    """The best of each epoch's exchanges that lower the cost, the best of all first."""
    chosen: dict[int, int] = {}
    for place in costs.argsort(stable=True).tolist():
        if float(costs[place]) < lowest:
            chosen.setdefault(int(epochs[place]), place)
    return list(chosen.values())


def _together(order: Tensor, exchanges: Tensor) -> Tensor:
    """The order after the first exchange, after the first two, and so on: in different epochs they mostly add up."""
    made = [order]
    for exchange in exchanges:
        made.append(_exchanged(made[-1], exchange[None])[0])
    return torch.stack(made)[1:]


def _exchanges(local: LocalSteps) -> Tensor:
    """What may be exchanged, as rows (place, place, length) of runs of places in all epochs, one behind the other.

    Two examples in different batches of an epoch, two batches of it, or two epochs. One example at a time does not get
    from every order to every better one: an update hardly tells in which of the epochs something was.
    """
    found, count = [], local.examples
    for epoch in range(local.epochs):
        sizes = local.batch_sizes[epoch * local.in_epoch : (epoch + 1) * local.in_epoch]
        batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        one, other = torch.triu_indices(count, count, 1)
        apart = batch[one] != batch[other]
        found.append(torch.stack([one[apart], other[apart], torch.ones_like(one[apart])], 1) + _shift(epoch * count))
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        batches = [
            (starts[i], starts[j], size) for j, size in enumerate(sizes) for i in range(j) if sizes[i] == size > 1
        ]
        found.append(torch.tensor(batches, dtype=torch.int64).reshape(-1, 3) + _shift(epoch * count))
    if local.ordered:
        epochs = torch.triu_indices(local.epochs, local.epochs, 1).T * count
        found.append(torch.cat([epochs, torch.full((len(epochs), 1), count)], 1))
    return torch.cat(found)


def _shift(places: int) -> Tensor:
    """What is added to rows of exchanges in a later epoch."""
    return torch.tensor([places, places, 0])


def _exchanged(order: Tensor, moves: Tensor) -> Tensor:
    """The order after each of some exchanges: (M, epochs, B)."""
    one, other, length = (column[:, None] for column in moves.T)
    place = torch.arange(order.numel())
    first, second = (((place >= start) & (place < start + length)) for start in (one, other))
    source = torch.where(first, place + other - one, torch.where(second, place + one - other, place))
    return order.reshape(-1)[source].reshape(len(moves), *order.shape)


def arranged(values: Tensor, order: Tensor) -> Tensor:
    """Values (V, B, ...) in the order (V, B) of each victim."""
    return values[torch.arange(len(order), device=order.device)[:, None], order]
