"""What an update must be for a server to take it. One client's mistake must not spoil the model of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedveil.tree import Tree, matrix

LONGEST = 1e15  # no model and no defense needs such an update; its square would soon leave the range of float32


@dataclass(frozen=True, eq=False)
class Intake:
    """Takes updates that are like a model's tensors, finite, and of a norm that is not absurd.

    >>> intake = Intake({"w": torch.zeros(2)})
    >>> intake.refuse({"w": torch.tensor([1.0, float("nan")])})
    'is not finite (NaN or infinity)'
    >>> intake.refuse({"w": torch.ones(3)})
    'has w of shape (3,), not (2,)'
    >>> intake.refuse({"w": torch.ones(2)}) is None
    True
    """

    like: Mapping[str, Tensor] = field(repr=False)  # names, shapes and types, without a client axis
    longest: float = LONGEST

    def refuse(self, update: Mapping[str, Tensor]) -> str | None:
        """Why one client's update is not taken; None where it is."""
        return self.refused(Tree({name: tensor.unsqueeze(0) for name, tensor in update.items()})).get(0)

    def refused(self, updates: Tree) -> dict[int, str]:
        """The rows of stacked updates that are not taken, and why."""
        wrong = self._form(updates)
        if wrong:
            return dict.fromkeys(range(updates.count), wrong)
        floating = [matrix(tensor) for tensor in updates.values() if tensor.is_floating_point()]
        if not floating:
            return {}
        # One pass over the entries is enough where all is well: a norm of finite length has finite terms.
        each = torch.stack([torch.linalg.vector_norm(t, dim=1, dtype=_wide(t)).double() for t in floating])
        norms = torch.linalg.vector_norm(each, dim=0)
        if bool((norms <= self.longest).all()):
            return {}
        finite = torch.stack([torch.isfinite(tensor).all(1) for tensor in floating]).all(0)
        found = {}
        for row in (~(norms <= self.longest)).nonzero().flatten().tolist():
            long = f"has a norm of {float(norms[row]):.3g}, above {self.longest:.3g}"
            found[row] = long if finite[row] else "is not finite (NaN or infinity)"
        return found

    def _form(self, updates: Mapping[str, Tensor]) -> str | None:
        for name in self.like.keys() - updates.keys():
            return f"has no {name}"
        for name, tensor in updates.items():
            if name not in self.like:
                return f"has {name}, which is not in the model"
            if tensor.shape[1:] != self.like[name].shape:
                return f"has {name} of shape {tuple(tensor.shape[1:])}, not {tuple(self.like[name].shape)}"
            if tensor.dtype != self.like[name].dtype:
                return f"has {name} of type {tensor.dtype}, not {self.like[name].dtype}"
        return None


def _wide(tensor: Tensor) -> torch.dtype:
    """A type that the norm of half-precision numbers does not overflow."""
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32
