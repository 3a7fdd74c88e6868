"""L-BFGS for many independent problems at once.

`torch.optim.LBFGS` treats all its parameters as one problem: stacked victims would share one step size and one
curvature. Here the first axis is the victim and every inner product is taken per row; for a single row the iterates
are those of `torch.optim.LBFGS` without line search, which a test holds it to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # (V, n) -> costs (V,), gradients (V, n)


class StackedLBFGS:
    """State of V independent L-BFGS minimizations of n variables each.

    `step` runs up to `max_iter` iterations for every row that has not converged; a row whose cost or gradient stops
    being finite stays at its last finite point.
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
        self.max_eval = max_iter * 5 // 4
        self.history = history
        self.tolerance_grad = tolerance_grad
        self.tolerance_change = tolerance_change
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # (s, y, rho) with rho = 0 where a row skipped a pair
        self._scale: Tensor | None = None
        self._direction: Tensor | None = None
        self._previous: Tensor | None = None
        self._length: Tensor | None = None

    def step(self, point: Tensor, evaluate: Evaluate) -> tuple[Tensor, Tensor]:
        """The new points and the costs at the start of the step."""
        cost, gradient = evaluate(point)
        first_cost = cost
        active = torch.isfinite(cost) & (gradient.abs().amax(1) > self.tolerance_grad)
        evaluations = 1
        for iteration in range(1, self.max_iter + 1):
            if not bool(active.any()):
                break
            direction, length = self._next(gradient, active)
            slope = (gradient * direction).sum(1)
            active = active & (slope <= -self.tolerance_change)
            moved = torch.where(active[:, None], point + length[:, None] * direction, point)
            self._direction, self._length, self._previous = direction, length, gradient
            before, previous_cost = point, cost
            point = moved
            if iteration == self.max_iter:
                break
            new_cost, new_gradient = evaluate(point)
            evaluations += 1
            finite = torch.isfinite(new_cost) & torch.isfinite(new_gradient).all(1)
            point = torch.where(finite[:, None], point, before)
            moving = active & finite
            cost = torch.where(moving, new_cost, cost)
            gradient = torch.where(moving[:, None], new_gradient, gradient)
            small = (length[:, None] * direction).abs().amax(1) <= self.tolerance_change
            flat = gradient.abs().amax(1) <= self.tolerance_grad
            still = (cost - previous_cost).abs() < self.tolerance_change
            active = moving & ~small & ~flat & ~still
            if evaluations >= self.max_eval:
                break
        return point, first_cost

    def _next(self, gradient: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """The search direction and step length of every row; rows at rest keep theirs."""
        if self._direction is None or self._previous is None or self._length is None or self._scale is None:
            self._scale = torch.ones_like(gradient[:, 0])
            start = self.lr * (1 / gradient.abs().sum(1).clamp_min(1e-30)).clamp_max(1.0)
            return -gradient, start
        change = gradient - self._previous
        moved = self._direction * self._length[:, None]
        product = (change * moved).sum(1)
        good = active & (product > 1e-10)
        if bool(good.any()):
            if len(self._pairs) == self.history:
                self._pairs.pop(0)
            rho = torch.where(good, 1 / product.where(good, torch.ones_like(product)), torch.zeros_like(product))
            keep = good[:, None]
            self._pairs.append((moved * keep, change * keep, rho))
            square = change.square().sum(1)
            self._scale = torch.where(good, product / square.clamp_min(1e-30), self._scale)
        direction = -gradient
        factors = []
        for s, y, rho in reversed(self._pairs):
            factor = rho * (s * direction).sum(1)
            direction = direction - factor[:, None] * y
            factors.append(factor)
        direction = direction * self._scale[:, None]
        for (s, y, rho), factor in zip(self._pairs, reversed(factors), strict=True):
            back = rho * (y * direction).sum(1)
            direction = direction + (factor - back)[:, None] * s
        chosen = torch.where(active[:, None], direction, self._direction)
        return chosen, torch.full_like(self._length, self.lr)
