"""What an update must be for a server to take it. One client's mistake must not spoil the model of all.

The same code serves whoever takes an update or lets one out: the in-process server, `Guard` and captures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedveil.tree import REAL, Tree, matrix

LONGEST = 1e15  # no model and no defense needs such an update; its square would soon leave the range of float32


@dataclass(frozen=True, eq=False)
class Intake:
    """Takes updates that are like a model's tensors, finite, and of a norm that is not absurd.

    >>> intake = Intake({"w": torch.zeros(2)})
    >>> intake.refuse({"w": torch.tensor([1.0, float("nan")])})
    'is not finite (NaN or infinity) in w'
    >>> intake.refuse({"w": torch.ones(3)})
    'has w of shape (3,), not (2,)'
    >>> intake.refuse({"w": torch.ones(2)}) is None
    True
    """

    like: Mapping[str, Tensor] = field(repr=False)  # names, shapes and types, without a client axis
    longest: float = LONGEST

    def refuse(self, update: Any) -> str | None:
        """Why one client's update is not taken, whatever it is; None where it is. Reads on from "the update ..."."""
        if not isinstance(update, Mapping):
            return f"must be tensors by name, not {type(update).__name__}"
        for name, tensor in update.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                return f"has {name}, which is not a tensor"
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                return f"has {name}, which is not a plain tensor with all its values"
        return self.refused(Tree.expand(update, 1)).get(0)

    def refused(self, updates: Tree) -> dict[int, str]:
        """The rows of stacked updates that are not taken, and why."""
        if updates.count == 1:  # the row of a single client need not be stacked
            wrong = self._wrong_in(updates.row(0))
            return {0: wrong} if wrong else {}
        wrong = self._form(updates, axes=1)
        if wrong:
            return dict.fromkeys(range(max(updates.count, 1)), wrong)
        floating = [matrix(tensor) for tensor in updates.values() if tensor.is_floating_point()]
        if not floating:
            return {}
        each = torch.stack([torch.linalg.vector_norm(t, dim=1, dtype=_wide(t)) for t in floating])
        norms = torch.linalg.vector_norm(each, dim=0, dtype=torch.float64)
        words = {row: _beyond(norm, self.longest, updates, row) for row, norm in enumerate(norms.tolist())}
        return {row: wrong for row, wrong in words.items() if wrong}

    def _wrong_in(self, update: Mapping[str, Tensor]) -> str | None:
        """Why one client's update is not taken."""
        return self._form(update, axes=0) or too_long(update, self.longest)

    def _form(self, updates: Mapping[str, Tensor], axes: int) -> str | None:
        """What is wrong with names, shapes behind the first axes, and types."""
        if updates.keys() != self.like.keys():
            for name in self.like:
                if name not in updates:
                    return f"has no {name}"
            extra = next(name for name in updates if name not in self.like)
            return f"has {extra}, which is not in the model"
        for name, tensor in updates.items():
            like = self.like[name]
            if tensor.shape[axes:] != like.shape:
                return f"has {name} of shape {tuple(tensor.shape[axes:])}, not {tuple(like.shape)}"
            if tensor.dtype != like.dtype:
                return f"has {name} of type {tensor.dtype}, not {like.dtype}"
            if tensor.dtype not in REAL and (tensor.is_floating_point() or tensor.is_complex()):
                return f"has {name} of type {tensor.dtype}: real numbers must be of 16 bits or more"
        return None


def too_long(update: Mapping[str, Tensor], longest: float = LONGEST) -> str | None:
    """Why one client's update of the right form is not taken."""
    floating = [tensor for tensor in update.values() if tensor.is_floating_point()]
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in floating) else torch.float32
    norms = torch._foreach_norm(floating, 2, dtype=wide) if floating else ()
    return _beyond(math.hypot(*[float(norm) for norm in norms]), longest, update)


def _beyond(norm: float, longest: float, updates: Mapping[str, Tensor], row: int | None = None) -> str | None:
    """Why an update of that norm is not taken. If the norm is finite, so are all entries: one pass is enough."""
    if norm <= longest and norm < math.inf:
        return None
    for name, tensor in updates.items():
        if tensor.is_floating_point() and not bool((tensor if row is None else tensor[row]).isfinite().all()):
            return f"is not finite (NaN or infinity) in {name}"
    return None if norm <= longest else f"has a norm of {norm:.3g}, above {longest:.3g}"


def _wide(tensor: Tensor) -> torch.dtype:
    """A type that the norm of half-precision numbers does not overflow."""
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32
