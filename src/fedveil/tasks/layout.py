"""What an attacker knows of the inputs' form: their kind, shape and range."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """The public form of one input. A kind of data that needs more (columns, a vocabulary) adds its field here."""

    modality: str  # the name of the kind of data: "pictures"
    shape: tuple[int, ...]
    box: tuple[Tensor, Tensor] | None = None  # lowest and highest valid input, broadcast to `shape`
