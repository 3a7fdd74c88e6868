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
    areas = []
    for column, truth in zip(scores.double().T, targets.T > 0.5, strict=True):
        positive, negative = int(truth.sum()), int((~truth).sum())
        if positive and negative:
            # The Mann-Whitney statistic: ranks start at 1, and equal scores share their mean rank.
            _, group, counts = torch.unique(column, return_inverse=True, return_counts=True)
            ranks = (counts.cumsum(0) - (counts.double() - 1) / 2)[group]
            above = ranks[truth].sum() - positive * (positive + 1) / 2
            areas.append(float(above / (positive * negative)))
    return sum(areas) / len(areas) if areas else None
