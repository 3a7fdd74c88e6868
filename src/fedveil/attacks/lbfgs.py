"""L-BFGS for many independent problems at once.

`torch.optim.LBFGS` treats all its parameters as one problem: stacked victims would share one step size and one
curvature. Here the first axis is the victim and every inner product is taken per row; each row's iterates are those of
`torch.optim.LBFGS` without line search on that row alone, which a test holds it to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # (V, n) -> costs (V,), gradients (V, n)


class StackedLBFGS:
    """State of V independent L-BFGS minimizations of n variables each.

    `step` runs up to `max_iter` iterations for every row that has not converged; a row whose cost or gradient stops
    being finite goes back to its last finite point.
    """

    def __init__(
        self,
        lr: float = 1.0,
        max_iter: int = 20,
        history: int = 100,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
    ) -> None:
        self.lr = lr
        self.max_iter = max_iter
        self.history = history
        self.tolerance_grad = tolerance_grad
        self.tolerance_change = tolerance_change
        self._memory: _Memory | None = None
        self._begun: Tensor  # (V,) whether a row has made its first iteration; these four are set with the memory
        self._direction: Tensor
        self._length: Tensor  # (V,)
        self._previous: Tensor  # gradients before the last move
        self._finite: Tensor  # the last point of each row with a finite cost and gradient

    def step(self, point: Tensor, evaluate: Evaluate, resting: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The new points and the costs at the start of the step.

        resting: rows (V,) that stay where they are.
        """
        cost, gradient = evaluate(point)
        if self._memory is None:
            self._memory = _Memory(self.history, point)
            self._begun = torch.zeros_like(cost, dtype=torch.bool)
            self._direction, self._length = torch.zeros_like(point), torch.zeros_like(cost)
            self._previous, self._finite = torch.zeros_like(point), point
        first_cost = cost
        finite = _finite(cost, gradient)
        point = self.settle(point, finite)
        active = finite & (gradient.abs().amax(1) > self.tolerance_grad)
        if resting is not None:
            active = active & ~resting
        for iteration in range(1, self.max_iter + 1):
            if not bool(active.any()):
                break
            self._turn(gradient, active)
            active = active & ((gradient * self._direction).sum(1) <= -self.tolerance_change)
            move = self._length[:, None] * self._direction
            point = torch.where(active[:, None], point + move, point)
            if iteration == self.max_iter:
                break
            new_cost, new_gradient = evaluate(point)
            finite = _finite(new_cost, new_gradient)
            point = self.settle(point, finite)
            active = active & finite
            change = (new_cost - cost).abs()
            cost = torch.where(active, new_cost, cost)
            gradient = torch.where(active[:, None], new_gradient, gradient)
            active = active & (gradient.abs().amax(1) > self.tolerance_grad)
            active = active & (move.abs().amax(1) > self.tolerance_change) & (change >= self.tolerance_change)
        return point, first_cost

    def settle(self, point: Tensor, finite: Tensor) -> Tensor:
        """The points, with rows whose cost is not finite (by the mask) back at their last one that was."""
        self._finite = torch.where(finite[:, None], point, self._finite)
        return self._finite

    def _turn(self, gradient: Tensor, active: Tensor) -> None:
        """The next direction and step length of the active rows; rows at rest keep theirs."""
        assert self._memory is not None
        pairs = active & self._begun
        self._memory.add(self._direction * self._length[:, None], gradient - self._previous, pairs)
        first = self.lr * (1 / gradient.abs().sum(1)).clamp_max(1.0)
        length = torch.where(self._begun, torch.full_like(first, self.lr), first)
        self._direction = torch.where(active[:, None], self._memory.direction(gradient), self._direction)
        self._length = torch.where(active, length, self._length)
        self._previous = torch.where(active[:, None], gradient, self._previous)
        self._begun = self._begun | active


class _Memory:
    """The last moves s and gradient changes y of every row, each row with as many as it made itself.

    The two loops of L-BFGS are two triangular systems in the products s·y: one batched product does what would be
    hundreds of small ones.
    """

    def __init__(self, most: int, like: Tensor) -> None:
        rows, size = like.shape
        self.most = most
        self.moves = like.new_zeros(rows, 0, size)
        self.changes = like.new_zeros(rows, 0, size)
        self.products = like.new_zeros(rows, 0, 0)  # s_i · y_j
        self.age = torch.zeros(rows, 0, dtype=torch.int64, device=like.device)  # when a pair was added; −1: none yet
        self.count = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.scale = like.new_ones(rows)

    def add(self, move: Tensor, change: Tensor, rows: Tensor) -> None:
        """Remember a pair of those rows whose pair shows positive curvature."""
        product = (move * change).sum(1)
        good = (rows & (product > 1e-10)).nonzero().flatten()
        if not len(good):
            return
        self._make_room(int(self.count[good].max()) + 1)
        place = self.count[good] % self.most
        s, y = move[good], change[good]
        self.moves[good, place], self.changes[good, place] = s, y
        self.products[good, place] = (self.changes[good] @ s[:, :, None]).squeeze(2)
        self.products[good, :, place] = (self.moves[good] @ y[:, :, None]).squeeze(2)
        self.age[good, place] = self.count[good]
        self.count[good] += 1
        self.scale[good] = product[good] / y.square().sum(1)

    def direction(self, gradient: Tensor) -> Tensor:
        """Minus the inverse Hessian's estimate times the gradient."""
        scale = self.scale[:, None]
        if not self.age.shape[1]:
            return -gradient * scale
        # In the order of their age the products s_i · y_j with j not older than i form an upper triangle.
        order = self.age.argsort(1)
        across = order[:, None].expand_as(self.products)
        products = self.products.gather(1, across.mT).gather(2, across)
        empty = (self.age.gather(1, order) < 0).to(gradient.dtype)
        diagonal = products.diagonal(dim1=1, dim2=2) + empty
        triangle = products.triu(1) + torch.diag_embed(diagonal)

        def along(pairs: Tensor, vector: Tensor) -> Tensor:
            return (pairs @ vector[:, :, None]).squeeze(2).gather(1, order)

        def together(pairs: Tensor, factors: Tensor) -> Tensor:
            placed = torch.zeros_like(factors).scatter(1, order, factors)
            return (placed[:, None] @ pairs).squeeze(1)

        def solved(matrix: Tensor, right: Tensor, upper: bool) -> Tensor:
            found: Tensor = torch.linalg.solve_triangular(matrix, right[:, :, None], upper=upper)
            return found.squeeze(2)

        back = solved(triangle, along(self.moves, -gradient), upper=True)
        middle = scale * (-gradient - together(self.changes, back))
        forth = solved(triangle.mT, diagonal * back - along(self.changes, middle), upper=False)
        return middle + together(self.moves, forth)

    def _make_room(self, wanted: int) -> None:
        """Grow by doubling: short runs need little of a long memory."""
        now = self.age.shape[1]
        if wanted <= now or now == self.most:
            return
        more = min(max(2 * now, 16), self.most) - now
        pad = torch.nn.functional.pad
        self.moves, self.changes = (pad(pairs, (0, 0, 0, more)) for pairs in (self.moves, self.changes))
        self.products = pad(self.products, (0, more, 0, more))
        self.age = pad(self.age, (0, more), value=-1)


def _finite(cost: Tensor, gradient: Tensor) -> Tensor:
    return torch.isfinite(cost) & torch.isfinite(gradient).all(1)
