"""The rows of a table as examples: kept as cells, given to the model standardized and with a place per category."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.tasks.columns import Columns
from fedveil.tasks.examples import ArrayExamples, Examples


class TableExamples(ArrayExamples):
    """Rows of a table, (N, columns) in double precision, and their labels."""

    def __init__(self, columns: Columns, cells: Tensor, labels: Tensor) -> None:
        super().__init__(cells, labels)
        self.columns = columns
        said = f"{self.source_sha256} {json.dumps(columns.described())}"
        self.source_sha256 = hashlib.sha256(said.encode()).hexdigest()

    def _model_values(self, tensor: Tensor) -> Tensor:
        assert self.columns is not None
        return self.columns.encode(tensor).to(self.dtype)


def fitted_columns(train: Examples, others: list[Examples]) -> Columns:
    """The columns with the training part's means and deviations, and the range of all parts."""
    columns = train.columns
    assert columns is not None
    for each in others:
        if each.columns is None or [c.categories for c in each.columns] != [c.categories for c in columns]:
            raise FedveilError("the parts of the data differ in their columns: declare the same for all")
    mine, *theirs = (_cells(each) for each in (train, *others))
    return columns.fitted(mine, torch.cat([mine, *theirs]))


def _cells(examples: Examples) -> Tensor:
    """The cells of examples, whatever they are standardized by now."""
    columns = examples.columns
    assert columns is not None
    rows = [inputs for inputs, _ in examples.as_type(torch.float64).batches(4096) if isinstance(inputs, Tensor)]
    return columns.cells(torch.cat(rows))
