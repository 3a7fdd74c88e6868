"""What an attacker knows of the inputs' form: their kind, shape and range."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedveil.tasks.columns import Columns
from fedveil.tasks.inputs import Inputs
from fedveil.tasks.text_form import TextForm


@dataclass(frozen=True, eq=False)
class Layout:
    """The public form of one input. A kind of data that needs more (columns, a vocabulary) adds its field here."""

    modality: str  # the name of the kind of data: "pictures", "records", "sentences"
    shape: tuple[int, ...]
    box: tuple[Tensor, Tensor] | None = None  # lowest and highest valid input, broadcast to `shape`
    columns: Columns | None = None  # of a table: which places belong to which column, its range or its categories
    text: TextForm | None = None  # of sentences: the vocabulary, and what a model takes of them

    def settled(self, inputs: Tensor) -> Tensor:
        """Inputs (..., *shape) in which each category of a table is one of its column's; others as they are."""
        return inputs if self.columns is None else self.columns.settled(inputs)

    def inputs(self, stored: Inputs) -> Inputs:
        """What the model takes, of inputs (..., *shape) as they are stored and compared."""
        return self.text.inputs(stored) if self.text is not None and isinstance(stored, Tensor) else stored

    def drawn(self, uniform: Tensor) -> Tensor:
        """Inputs made of numbers between 0 and 1 (..., *shape): any will do to see what a model computes."""
        return uniform if self.text is None else (uniform * self.text.entries).floor()
