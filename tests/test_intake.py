"""What is taken, what is refused, and how it is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedveil.intake import Intake
from fedveil.tree import Tree

LIKE = {"w": torch.zeros(2, 3), "b": torch.zeros(3), "n": torch.tensor(4)}


def update(**changed: Tensor) -> dict[str, Tensor]:
    return {"w": torch.ones(2, 3), "b": torch.ones(3), "n": torch.tensor(4), **changed}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (update(), None),
        (update(b=torch.full((3,), 1e14)), None),
        (update(b=torch.tensor([0.0, float("inf"), 0.0])), "is not finite (NaN or infinity)"),
        (update(w=torch.full((2, 3), float("nan"))), "is not finite (NaN or infinity)"),
        (update(b=torch.tensor([0.0, 2e15, 0.0])), "has a norm of 2e+15, above 1e+15"),
        (update(b=torch.tensor([0.0, 1e30, 0.0])), "has a norm of inf, above 1e+15"),
        (update(b=torch.ones(4)), "has b of shape (4,), not (3,)"),
        (update(b=torch.ones(3).double()), "has b of type torch.float64, not torch.float32"),
        (update(c=torch.ones(1)), "has c, which is not in the model"),
        ({"w": torch.ones(2, 3), "b": torch.ones(3)}, "has no n"),
    ],
    ids=str,
)
def test_one_update(given: dict[str, Tensor], said: str | None) -> None:
    assert Intake(LIKE).refuse(given) == said


def test_of_a_stack_only_the_broken_rows() -> None:
    rows = [update(), update(b=torch.tensor([float("nan"), 0.0, 0.0])), update(), update(w=torch.full((2, 3), 9e15))]
    assert Intake(LIKE).refused(Tree.stack(rows)).keys() == {1, 3}
    assert Intake(LIKE).refused(Tree.stack(rows[:1])) == {}
    assert Intake({}).refused(Tree({})) == {}


def test_half_precision_is_not_taken_for_infinite() -> None:
    long = {"w": torch.full((1000,), 6e4, dtype=torch.float16)}  # its norm is beyond what the type can hold
    assert Intake(long).refuse(long) is None
