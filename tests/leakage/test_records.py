"""Rows of a table: cells, whole rows, and what a report shows of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import fedveil as fv
from fedveil.errors import FedveilError
from fedveil.leakage.modalities import modality_of
from fedveil.leakage.records import Records
from fedveil.leakage.truths import Truths
from fedveil.tasks.columns import Column, Columns

COLUMNS = Columns((Column("age", low=0, high=100, mean=40, std=20), Column("city", ("A", "B", "C"))))
KIND = replace(Records(), columns=COLUMNS)
CELLS = torch.tensor([[[30.0, 0], [60, 2]], [[41, 1], [80, 2]]])


def scored(found: Tensor, true: Tensor = CELLS) -> dict[str, list[float]]:
    rows = COLUMNS.encode(true)
    truths = Truths(
        rows, torch.zeros(2, 2), rows, (1, 1), distractors=COLUMNS.encode(CELLS.flip(0)).flatten(0, 1)[:, None]
    )
    return {name: value.double().tolist() for name, value in KIND.score(found, truths).values.items()}


def test_a_number_counts_within_the_tolerance_and_a_category_exactly() -> None:
    moved = CELLS.clone()
    moved[0, 0, 0] += 1.9  # a tenth of the deviation is 2
    moved[0, 1, 0] -= 2.1
    moved[1, 1, 1] = 0
    got = scored(COLUMNS.encode(moved))
    assert got["number_cells"] == [1, 0, 1, 1]
    assert got["category_cells"] == [1, 1, 1, 0]
    assert got["cells"] == [1, 0.5, 1, 0.5]
    assert got["whole_rows"] == [1, 0, 1, 0]
    assert got["identified"] == [1, 1, 1, 1]


def test_order_within_a_batch_does_not_count_and_mixed_categories_are_settled() -> None:
    soft = COLUMNS.encode(CELLS.flip(1))
    soft[..., 1:] = 0.8 * soft[..., 1:] + 0.1
    assert scored(soft)["whole_rows"] == [1, 1, 1, 1]


def test_what_diverged_is_flagged_where_it_stands() -> None:
    broken = COLUMNS.encode(CELLS)
    broken[1, 1, 0] = torch.nan
    got = scored(broken)
    assert got["diverged"] == [0, 0, 0, 1]
    assert got["whole_rows"][:3] == [1, 1, 1]


def test_the_exhibit_has_cells() -> None:
    assert torch.allclose(KIND.exhibit(COLUMNS.encode(CELLS)), CELLS)


def test_the_floor_is_the_mean_and_the_most_frequent_category() -> None:
    rows = {"age": torch.arange(40.0).numpy(), "city": np.array(["A", "B", "B", "C"] * 10)}
    task = fv.Task(torch.nn.Linear(4, 2), (rows, torch.arange(40) % 2), columns="inferred")
    kind, _ = modality_of(task).equipped(task, {"tolerance": "0.2"})
    assert isinstance(kind, Records)
    assert kind.tolerance == 0.2
    assert kind.floor(task.train).tolist() == pytest.approx([0, 0, 1, 0], abs=1e-6)
    with pytest.raises(FedveilError, match="lpips compares pictures"):
        kind.check(task, {"lpips": "alex"})
