"""How far data defenses moved the inputs, in pixels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedveil.federation.history import Perturbation
from fedveil.tasks.inputs import Inputs, leaves
from fedveil.tasks.normalization import Normalization


def perturbation(
    pairs: Iterable[tuple[Inputs, Inputs]], normalization: Normalization | None, perturb: str | None = None
) -> Perturbation | None:
    """The size of what lies between inputs and what the gradient was taken at; None where that is nothing.

    pairs: both of shape (examples, ...). perturb: the part of the inputs that defenses move.

    >>> black, moved = torch.zeros(1, 1, 1, 2), torch.tensor([[[[0.3, 0.4]]]])
    >>> print(perturbation([(black, moved)], Normalization((0.5,), (0.1,))))
    a pixel moves by 8.9/255 in the mean and 10/255 at most (L2 0.05 in pixels, 0.5 in the model's input space)
    """
    found = [_changes(leaves(was).get(perturb), leaves(seen).get(perturb), normalization) for was, seen in pairs]
    changes = [change for change in found if change is not None]
    if not changes:
        return None
    change, plain = (torch.cat(parts) for parts in zip(*changes, strict=True))
    if not plain.any():
        return None
    length, greatest = torch.linalg.vector_norm(change, dim=1), change.abs().amax(1)
    return Perturbation(
        unit="input" if normalization is None else "pixels",
        mean=float(change.abs().mean()),
        l2=float(length.mean()),
        l2_max=float(length.max()),
        linf=float(greatest.mean()),
        linf_max=float(greatest.max()),
        l2_input=float(torch.linalg.vector_norm(plain, dim=1).mean()),
    )


def _changes(
    was: Tensor | None, seen: Tensor | None, normalization: Normalization | None
) -> tuple[Tensor, Tensor] | None:
    """Each example's change in pixels and in input space, as rows."""
    if was is None or seen is None or was.shape != seen.shape or not was.is_floating_point() or not was.numel():
        return None
    was, seen = was.double(), seen.double()
    plain = (seen - was).flatten(1)
    if normalization is None:
        return plain, plain
    return (normalization.pixels(seen) - normalization.pixels(was)).flatten(1), plain
