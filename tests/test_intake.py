"""What is taken, what is refused, and how it is told."""

from __future__ import annotations

import math

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
        (update(b=torch.tensor([0.0, float("inf"), 0.0])), "is not finite (NaN or infinity) in b"),
        (update(w=torch.full((2, 3), float("nan"))), "is not finite (NaN or infinity) in w"),
        (update(b=torch.tensor([0.0, 2e15, 0.0])), "has a norm of 2e+15, above 1e+15"),
        (update(b=torch.tensor([0.0, 1e30, 0.0])), "has a norm of inf, above 1e+15"),
        (update(b=torch.ones(4)), "has b of shape (4,), not (3,)"),
        (update(b=torch.ones(3).double()), "has b of type torch.float64, not torch.float32"),
        (update(c=torch.ones(1)), "has c, which is not in the model"),
        ({"w": torch.ones(2, 3), "b": torch.ones(3)}, "has no n"),
        ({}, "has no w"),
        ([torch.ones(2, 3)], "must be tensors by name, not list"),
        (update(b=[1.0, 2.0, 3.0]), "has b, which is not a tensor"),  # type: ignore[arg-type]
        (update(b=torch.ones(3, device="meta")), "has b, which is not a plain tensor with all its values"),
        (update(w=torch.ones(2, 3).to_sparse()), "has w, which is not a plain tensor with all its values"),
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


def test_without_a_bound_on_the_norm_only_broken_numbers_are_refused() -> None:
    free = Intake(LIKE, longest=math.inf)
    assert free.refuse(update(b=torch.full((3,), 1e30))) is None  # its square is beyond float32
    assert free.refuse(update(b=torch.tensor([1e30, float("inf"), 0.0]))) == "is not finite (NaN or infinity) in b"
    assert free.refused(
        Tree.stack([update(b=torch.full((3,), 1e30)), update(b=torch.full((3,), torch.nan))])
    ).keys() == {1}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2])
def test_what_is_no_real_number_is_refused_whatever_the_model_has(dtype: torch.dtype) -> None:
    odd = {"w": torch.ones(2).to(dtype)}
    assert Intake(odd).refuse(odd) == f"has w of type {dtype}: real numbers must be of 16 bits or more"


def test_half_precision_is_not_taken_for_infinite() -> None:
    long = {"w": torch.full((1000,), 6e4, dtype=torch.float16)}  # its norm is beyond what the type can hold
    assert Intake(long).refuse(long) is None
