"""Which reconstruction belongs to which original: a batch's gradient does not tell the order of its images."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def assign(reconstructions: Tensor, originals: Tensor) -> tuple[Tensor, Tensor]:
    """Reorder each victim's reconstructions so that their total squared error to the originals is the least.

    Both are (V, B, ...): V victims with a batch of B images each. Returns the reordered reconstructions and the
    permutation (V, B): entry (v, j) is the reconstruction that goes with original j. Solved exactly, by the Hungarian
    method. Anything else that has one entry per image is put in the same order by `reorder`.

    A reconstruction with a pixel that is not finite is equally bad for every original: it takes whichever one the
    finite reconstructions leave over.
    """
    if reconstructions.shape != originals.shape or reconstructions.dim() < 2:
        raise ValueError(
            "reconstructions and originals must both be (victims, batch, ...): "
            f"{tuple(reconstructions.shape)} and {tuple(originals.shape)}"
        )
    found = [_match(found, true) for found, true in zip(reconstructions, originals, strict=True)]
    batch = reconstructions.shape[1]
    permutation = torch.from_numpy(np.array(found, dtype=np.int64).reshape(-1, batch)).to(reconstructions.device)
    return reorder(reconstructions, permutation), permutation


def reorder(values: Tensor, permutation: Tensor) -> Tensor:
    """Values (V, B, ...) in the order of a permutation (V, B) that `assign` found."""
    victims = torch.arange(len(permutation), device=permutation.device).unsqueeze(1)
    return values[victims, permutation]


def _match(reconstructions: Tensor, originals: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    found = reconstructions.detach().to("cpu", torch.float64).flatten(1)
    true = originals.detach().to("cpu", torch.float64).flatten(1)
    cost = torch.cdist(true, found, compute_mode="donot_use_mm_for_euclid_dist").square()
    # A constant column adds the same to every assignment, so any constant leaves the rest at its own optimum.
    cost[:, ~torch.isfinite(found).all(1)] = 0
    columns: np.ndarray[tuple[int], np.dtype[np.int64]] = linear_sum_assignment(cost.numpy())[1]
    return columns
