"""Rows of a table: compared cell by cell. Readable without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedveil.errors import FedveilError
from fedveil.leakage.modality import Modality, Scores, Words

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.leakage.truths import Truths
    from fedveil.tasks.columns import Columns
    from fedveil.tasks.examples import Examples
    from fedveil.tasks.layout import Layout
    from fedveil.tasks.task import Task

TOLERANCE = 0.1  # standard deviations of a column, within which a number counts as recovered


@dataclass(frozen=True, eq=False)
class Records(Modality):
    """Rows of numbers and categories, as the model takes them: see `fedveil.tasks.columns`."""

    name = "records"
    words = Words(
        one="row", many="rows", rebuilt="a row", mean="mean row", picked="identified", not_picked="not identified"
    )
    headline = ("identified",)
    shown = ("identified", "cells", "whole_rows", "mse")
    nearness = "cells"
    caption = ("cells",)

    columns: Columns | None = None
    tolerance: float = TOLERANCE

    # ---- before an audit -------------------------------------------------------------------------------------

    def check(self, task: Task, tools: Mapping[str, str]) -> None:
        """Refuse what is no table, and a distance of pictures."""
        if task.columns is None:
            raise FedveilError(f"{task.name} is no table: name its columns (Task(..., columns=...))")
        if tools.get("lpips", "none") != "none":
            raise FedveilError(f"lpips compares pictures, and {task.name} is a table: use lpips 'none'")

    def equipped(self, task: Task, tools: Mapping[str, str]) -> tuple[Self, list[str]]:
        """With the columns of a task, and the tolerance for numbers."""
        return replace(self, columns=task.columns, tolerance=float(tools.get("tolerance", TOLERANCE))), []

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """The columns, and the range of every place."""
        from fedveil.tasks.layout import Layout

        return Layout(self.name, shape, self.table.box(), self.table)

    def described(self) -> dict[str, Any]:
        """The columns and the tolerance."""
        return {**super().described(), "columns": self.table.described(), "tolerance": self.tolerance}

    def floor(self, train: Examples) -> Tensor:
        """The mean of every number, and the most frequent category of every column."""
        import torch

        columns = train.columns
        assert columns is not None  # `check` admits tables only
        total = torch.zeros(columns.width, dtype=torch.float64)
        for inputs, _ in train.batches(4096):
            assert isinstance(inputs, torch.Tensor)
            total += inputs.double().sum(0)
        return columns.settled(total / len(train)).float()

    @property
    def table(self) -> Columns:
        """The columns, which only an equipped modality has."""
        if self.columns is None:
            raise ValueError("rows are scored and shown by the columns of a task: see `equipped`")
        return self.columns

    # ---- after the attack ------------------------------------------------------------------------------------

    def score(self, inputs: Tensor, truths: Truths, iterates: Sequence[Tensor] = ()) -> Scores:
        """Every metric, one value per row; within a batch reconstructions are assigned to originals first."""
        from fedveil.leakage.record_scores import score

        return score(self, inputs, truths)

    def exhibit(self, inputs: Tensor) -> Tensor:
        """The cells: numbers as they are in the table, and the place of each category in its column's list."""
        return self.table.cells(inputs.double()).float()

    def legend(self) -> dict[str, Any]:
        """What the cells mean, and how near a number must come."""
        said = ({"name": each.name, "categories": list(each.categories), "std": each.std} for each in self.table)
        return {"columns": list(said), "tolerance": self.tolerance}

    # ---- words -----------------------------------------------------------------------------------------------

    def recognizable(self, values: Mapping[str, ArrayLike], least: float) -> NDArray[np.bool_] | None:
        """Nearest to the right row, with enough of its cells."""
        if "cells" not in values or "identified" not in values:
            return None
        enough: NDArray[np.bool_] = np.asarray(values["cells"], dtype=float) >= least
        return enough & (np.asarray(values["identified"], dtype=float) >= 0.5)

    def recognizable_note(self, least: float) -> str:
        """By the cells that were recovered."""
        return (
            "A row counts as recognizable where it is nearer to the right row than to all the others, and at least "
            f"{100 * least:g} % of its cells were recovered: categories exactly, numbers within {self.tolerance:g} "
            "standard deviations of their column."
        )
