"""The compiled attack: equal to the stacked one, and one graph for all roles and any number of victims."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from .small import Choices, as_double, match, noise_target, on_the_way, random_problem
from .test_quality import one_stack

pytestmark = pytest.mark.compiles
CHOICES = Choices(steps=5, total_variation=1e-3)


@pytest.fixture(autouse=True)
def _not_kept(monkeypatch):
    """What `torch.compile` does where no package can be made; test_grouped_convolutions.py has the packages."""
    monkeypatch.setattr("fedveil.attacks.grouped_convolutions.packaged", lambda *_: None)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Sigmoid(), nn.Linear(6, 3))


def roles():
    """Ceiling, floor, naive and adaptive in one stack: full weights beside expanded ones."""
    problem = random_problem(model(), (1, 4, 4), victims=3)
    problem = replace(problem, box=(torch.full((1, 1, 1), -2.0), torch.full((1, 1, 1), 2.0)))
    trust = replace(problem, target=0.6 * problem.target, weight=problem.target.map(lambda t: torch.rand_like(t)))
    return one_stack([problem, noise_target(problem), problem, trust])


def told(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "fedveil"]


def test_compiled_equals_stacked_and_all_roles_are_one_graph(caplog):
    torch._dynamo.reset()
    counters.clear()
    problem = roles()  # 12 victims in chunks of 5: the last is filled up
    found = match(problem, replace(CHOICES, restarts=2), backend="compiled", chunk=5)
    assert counters["stats"]["unique_graphs"] == 1
    expected = match(problem, replace(CHOICES, restarts=2), backend="stacked", chunk=5)
    assert found.inputs.shape == expected.inputs.shape == (12, 2, 1, 4, 4)
    torch.testing.assert_close(on_the_way(found), on_the_way(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.cost, expected.cost, rtol=1e-4, atol=1e-5)
    assert not told(caplog)


def test_joint_labels_and_lbfgs_are_one_graph(caplog):
    torch._dynamo.reset()
    counters.clear()
    problem = as_double(roles().rows(slice(0, 4)))  # L-BFGS makes much of the last bits
    choices = Choices(cost="l2", optimizer="lbfgs", lr=1.0, steps=1, labels="optimized")
    found = match(problem, choices, backend="compiled", chunk=3)
    assert counters["stats"]["unique_graphs"] == 1
    expected = match(problem, choices, backend="stacked", chunk=3)
    torch.testing.assert_close(found.inputs, expected.inputs, rtol=1e-2, atol=1e-2)
    assert not told(caplog)
