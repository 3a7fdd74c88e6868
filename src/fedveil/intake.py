"""What an update must be for a server to take it. One client's mistake must not spoil the model of all.

The same code serves whoever takes an update or lets one out: the in-process server, `Guard` and captures.
"""

from __future__ import annotations

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
        return self.refused(Tree({name: tensor.unsqueeze(0) for name, tensor in update.items()})).get(0)

    def refused(self, updates: Tree) -> dict[int, str]:
        """The rows of stacked updates that are not taken, and why."""
        wrong = self._form(updates)
        if wrong:
            return dict.fromkeys(range(max(updates.count, 1)), wrong)
        floating = {name: matrix(tensor) for name, tensor in updates.items() if tensor.is_floating_point()}
        if not floating:
            return {}
        # One pass over the entries is enough where all is well: if the norm is finite, so are all entries.
        each = [torch.linalg.vector_norm(t, dim=1, dtype=_wide(t)).double() for t in floating.values()]
        norms = torch.linalg.vector_norm(torch.stack(each), dim=0)
        fine = (norms <= self.longest) & norms.isfinite()
        if bool(fine.all()):
            return {}
        found = {}
        for row in (~fine).nonzero().flatten().tolist():
            broken = [name for name, tensor in floating.items() if not bool(tensor[row].isfinite().all())]
            if broken:
                found[row] = f"is not finite (NaN or infinity) in {broken[0]}"
            elif not norms[row] <= self.longest:
                found[row] = f"has a norm of {float(norms[row]):.3g}, above {self.longest:.3g}"
        return found

    def _form(self, updates: Mapping[str, Tensor]) -> str | None:
        if updates.keys() != self.like.keys():
            for name in self.like:
                if name not in updates:
                    return f"has no {name}"
            extra = next(name for name in updates if name not in self.like)
            return f"has {extra}, which is not in the model"
        for name, tensor in updates.items():
            if tensor.shape[1:] != self.like[name].shape:
                return f"has {name} of shape {tuple(tensor.shape[1:])}, not {tuple(self.like[name].shape)}"
            if tensor.dtype != self.like[name].dtype:
                return f"has {name} of type {tensor.dtype}, not {self.like[name].dtype}"
            if tensor.dtype not in REAL and (tensor.is_floating_point() or tensor.is_complex()):
                return f"has {name} of type {tensor.dtype}: real numbers must be of 16 bits or more"
        return None


def _wide(tensor: Tensor) -> torch.dtype:
    """A type that the norm of half-precision numbers does not overflow."""
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32
