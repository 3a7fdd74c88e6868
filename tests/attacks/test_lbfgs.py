"""Stacked L-BFGS: every row is torch's own optimizer on that row alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.attacks.lbfgs import StackedLBFGS

SIZE = 6


def quadratics(count):
    """Bowls from nearly round to steep and long: they converge at different times."""
    torch.manual_seed(0)
    made = []
    for i in range(count):
        root = torch.randn(SIZE, SIZE, dtype=torch.float64)
        bowl = root @ root.T + 10.0 ** (i % 4 - 2) * torch.eye(SIZE, dtype=torch.float64)
        made.append(lambda x, bowl=bowl: 0.5 * x @ bowl @ x)
    return made


def valley(x):
    """Rosenbrock's bent valley, gentle enough for steps without a line search."""
    return 0.02 * (10 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def leak(seed):
    """A real DLG objective: the squared distance of a small sigmoid network's gradients, pixels and soft label."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 3)).double()
    weights = list(model.parameters())
    loss = F.cross_entropy(model(torch.randn(1, 8, dtype=torch.float64)), torch.tensor([seed % 3]))
    goal = torch.autograd.grad(loss, weights)

    def objective(x):
        guess = F.cross_entropy(model(x[None, :8]), x[None, 8:].softmax(-1))
        found = torch.autograd.grad(guess, weights, create_graph=True)
        return sum((a - b).square().sum() for a, b in zip(found, goal, strict=True))

    return objective


def stacked(functions):
    """The functions, one per row, as what the stacked optimizer evaluates."""

    def evaluate(points):
        costs, slopes = [], []
        for function, point in zip(functions, points, strict=True):
            live = point.clone().requires_grad_()
            cost = function(live)
            costs.append(cost.detach())
            slopes.append(torch.autograd.grad(cost, live)[0])
        return torch.stack(costs), torch.stack(slopes)

    return evaluate


class Alone:
    """torch's optimizer on one row."""

    def __init__(self, function, start, history=100):
        self.function = function
        self.point = start.clone().requires_grad_()
        self.optimizer = torch.optim.LBFGS([self.point], lr=1, max_iter=20, history_size=history)

    def step(self):
        def closure():
            self.optimizer.zero_grad()
            cost = self.function(self.point)
            self.point.grad = torch.autograd.grad(cost, self.point)[0]
            return cost

        return self.optimizer.step(closure).detach()

    @property
    def iterations(self):
        return self.optimizer.state[self.point].get("n_iter", 0)


def assert_rows_alone(functions, starts, steps, tolerance=1e-8, history=100):
    together = StackedLBFGS(lr=1, max_iter=20, history=history)
    alone = [Alone(function, start, history) for function, start in zip(functions, starts, strict=True)]
    points = starts
    for _ in range(steps):
        points, costs = together.step(points, stacked(functions))
        expected_costs = torch.stack([row.step() for row in alone])
        expected = torch.stack([row.point.detach() for row in alone])
        torch.testing.assert_close(points, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(costs, expected_costs, rtol=tolerance, atol=tolerance)
    return [row.iterations for row in alone]


def test_quadratics_that_converge_at_different_times():
    torch.manual_seed(1)
    iterations = assert_rows_alone(quadratics(8), 3 * torch.randn(8, SIZE, dtype=torch.float64), 5)
    assert len(set(iterations)) > 3


@pytest.mark.parametrize("history", [100, 4])
def test_bent_valleys_beside_bowls(history):
    """A short memory is per row: pairs of busy rows must not push out those of rows at rest."""
    torch.manual_seed(2)
    functions = [valley, *quadratics(3), valley]
    starts = 0.3 * torch.randn(5, SIZE, dtype=torch.float64)
    assert_rows_alone(functions, starts, 4, tolerance=1e-6, history=history)


def test_the_dlg_objective():
    torch.manual_seed(3)
    functions = [leak(seed) for seed in range(4)]
    iterations = assert_rows_alone(functions, torch.randn(4, 11, dtype=torch.float64), 4, tolerance=1e-5)
    assert max(iterations) > 40


def test_a_row_that_starts_at_its_minimum_stays_there():
    functions = quadratics(3)
    torch.manual_seed(4)
    starts = torch.randn(3, SIZE, dtype=torch.float64)
    starts[1] = 0
    assert_rows_alone(functions, starts, 3)


def test_a_row_at_rest_that_wakes_takes_its_own_first_step():
    """The cost of a row may change between steps (fresh noise): it then begins like any other row."""
    shift = torch.zeros((), dtype=torch.float64)
    functions = [quadratics(1)[0], lambda x: (x - shift).square().sum()]
    starts = torch.stack([torch.ones(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)])
    together = StackedLBFGS()
    alone = [Alone(function, start) for function, start in zip(functions, starts, strict=True)]
    points = starts
    for _ in range(3):
        points, _ = together.step(points, stacked(functions))
        for row in alone:
            row.step()
        torch.testing.assert_close(points, torch.stack([row.point.detach() for row in alone]))
        shift += 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_breaks_goes_back_and_disturbs_no_other(bad):
    torch.manual_seed(5)

    def cliff(x):
        """Downhill to where there is no number."""
        return x[0] + 0.01 * x.square().sum() if x[0] > -3 else bad * x.sum()

    functions = [valley, cliff, *quadratics(2)]
    starts = 0.3 * torch.randn(4, SIZE, dtype=torch.float64)
    whole, rest = StackedLBFGS(), StackedLBFGS()
    points, others = starts, starts[[0, 2, 3]]
    for _ in range(4):
        points, _ = whole.step(points, stacked(functions))
        others, _ = rest.step(others, stacked([functions[i] for i in (0, 2, 3)]))
        torch.testing.assert_close(points[[0, 2, 3]], others, rtol=1e-9, atol=1e-9)
    cost = stacked(functions)(points)[0]
    points = whole.settle(points, torch.isfinite(cost))
    assert torch.isfinite(points).all()
    assert points[1, 0] > -3
    assert points[1, 0] < starts[1, 0]


def test_a_row_broken_from_the_start_stays_where_it_is():
    functions = [*quadratics(2), lambda x: x.sum() * torch.nan]
    starts = torch.ones(3, SIZE, dtype=torch.float64)
    optimizer = StackedLBFGS()
    points = starts
    for _ in range(3):
        points, costs = optimizer.step(points, stacked(functions))
    assert torch.equal(points[2], starts[2])
    assert torch.isnan(costs[2])
    assert (points[:2].abs() < 1e-2).all()
