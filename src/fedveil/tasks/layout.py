"""What an attacker knows of the inputs' form: their kind, shape and range."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedveil.tasks.columns import Columns


@dataclass(frozen=True, eq=False)
class Layout:
    """The public form of one input. A kind of data that needs more (columns, a vocabulary) adds its field here."""

    modality: str  # the name of the kind of data: "pictures", "records"
    shape: tuple[int, ...]
    box: tuple[Tensor, Tensor] | None = None  # lowest and highest valid input, broadcast to `shape`
    columns: Columns | None = None  # of a table: which places belong to which column, its range or its categories

    def settled(self, inputs: Tensor) -> Tensor:
        """Inputs (..., *shape) in which each category of a table is one of its column's; others as they are."""
        return inputs if self.columns is None else self.columns.settled(inputs)
