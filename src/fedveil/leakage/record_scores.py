"""All metrics of reconstructed rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.leakage import metrics
from fedveil.leakage.assignment import assign
from fedveil.leakage.identified import identified
from fedveil.leakage.modality import Scores
from fedveil.leakage.records import Records
from fedveil.leakage.truths import Truths
from fedveil.tasks.columns import Columns


def score(records: Records, inputs: Tensor, truths: Truths) -> Scores:
    """Every metric of V victims' reconstructions (V, B, width), in the order of the originals.

    A diverged attack is not hidden: a value that is not finite counts as 0, which is the mean of a number, and the row
    is flagged in `diverged`.
    """
    diverged = ~torch.isfinite(inputs).all(-1)
    settled = records.table.settled(torch.nan_to_num(inputs.float(), nan=0.0, posinf=0.0, neginf=0.0))
    # The flag travels with its row while rows are put into the order of the originals.
    arranged, order = assign(settled, truths.originals)
    victims = torch.arange(len(order)).unsqueeze(1)
    found, true = arranged.flatten(0, 1), truths.originals.flatten(0, 1)
    values = recovered(records.table, found, true, records.tolerance)
    values["mse"] = metrics.mse(found, true)
    if truths.distractors is not None:
        values["identified"] = identified(found, true, truths.distractors)
    values["diverged"] = diverged.cpu()[victims, order.cpu()].flatten()
    return Scores(values, records.exhibit(found))


def recovered(columns: Columns, found: Tensor, true: Tensor, tolerance: float) -> dict[str, Tensor]:
    """The shares of the cells of each row (N, width) that were recovered, by kind, and which rows were wholly.

    A number is recovered within `tolerance` standard deviations of its column, a category exactly.
    """
    right = cells_recovered(columns, found, true, tolerance)
    numbers = torch.tensor([not column.categories for column in columns])
    values = {"cells": right.double().mean(1), "whole_rows": right.all(1)}
    for name, kind in (("number_cells", numbers), ("category_cells", ~numbers)):
        if bool(kind.any()) and not bool(kind.all()):
            values[name] = right[:, kind].double().mean(1)
    return values


def cells_recovered(columns: Columns, found: Tensor, true: Tensor, tolerance: float) -> Tensor:
    """Which cells (N, columns) of rows (N, width) were recovered."""
    far = (found.double() - true.double()).abs().cpu()
    right = [
        (far[:, place] < 0.5).all(1) if column.categories else far[:, place.start] <= tolerance
        for column, place in zip(columns, columns.places, strict=True)
    ]
    return torch.stack(right, 1)
