"""The area under the ROC curve: the chance that an example with a label scores above one without it."""

from __future__ import annotations

import torch
from torch import Tensor


def auroc(scores: Tensor, targets: Tensor) -> float | None:
    """The mean over labels of (N, L) scores against zeros and ones; labels that all examples or none have are left out.

    A tie counts as one half. None if no label is left.

    >>> auroc(torch.tensor([[0.1], [0.4], [0.35], [0.8]]), torch.tensor([[0.0], [0.0], [1.0], [1.0]]))
    0.75
    """
    found = auroc_by_example(scores, targets)
    return None if found is None else float(found.mean())


def auroc_by_example(scores: Tensor, targets: Tensor) -> Tensor | None:
    """One value for each of N examples, whose mean is the AUROC: for its interval, and for paired differences.

    An example adds to the area by how its score stands among those of the other kind (DeLong's components): the value
    is the area plus its first-order change when the example counts for more.
    """
    parts = []
    for column, truth in zip(scores.double().T, targets.T > 0.5, strict=True):
        positive, negative = int(truth.sum()), int((~truth).sum())
        if not positive or not negative:
            continue
        # The rank among all less that among its own kind counts those of the other kind below; ties count one half.
        below = _ranks(column)
        below[truth] -= _ranks(column[truth])
        below[~truth] -= _ranks(column[~truth])
        won = torch.where(truth, below / negative, 1 - below / positive)
        area = won[truth].mean()
        weight = torch.where(truth, len(truth) / positive, len(truth) / negative)
        parts.append(area + weight * (won - area))
    return torch.stack(parts).mean(0) if parts else None


def _ranks(values: Tensor) -> Tensor:
    """From 1; equal values share their mean rank."""
    _, group, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts.double() - 1) / 2
    return ranks[group]
