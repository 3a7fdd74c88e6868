"""Which held-out examples each original has to be told from. For any kind of data that is one tensor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import FedveilError


def choose(
    originals: Tensor, labels: Tensor, pool: Tensor, pool_labels: Tensor, *, count: int = 100, seed: int = 0
) -> Tensor:
    """Choose each original's distractors from held-out examples: indices into `pool`, shape (N, count - 1).

    Drawn without repetition from the original's own class; where that has too few, the rest comes from other classes.
    Of rows of several labels (N, L), and of numbers (N,) or (N, T), those nearest to the original's own come first, so
    that the targets alone tell as little as possible. An exact copy of the original is never chosen. An original's draw
    depends on the seed and its position alone.

    When the pool has fewer than `count` - 1 examples to offer, every original gets as many as there are: chance is
    always 1 / (indices.shape[1] + 1). An empty pool raises a `FedveilError`.
    """
    if count < 2:
        raise FedveilError(f"an original and its distractors are at least 2 candidates, got {count}")
    copies = _copies(originals.flatten(1), pool.flatten(1)).cpu().numpy()
    wanted = min(count - 1, int((~copies).sum(1).min()))
    if wanted < 1:
        raise FedveilError("an original is told from held-out examples that differ from it, and the pool has none")
    chosen = np.empty((len(originals), wanted), dtype=np.int64)
    for row, label in enumerate(labels):
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, row])))
        if labels.is_floating_point():
            free = random.permutation(np.flatnonzero(~copies[row]))
            away = (pool_labels - label).reshape(len(pool), -1).norm(dim=1).cpu().numpy()
            chosen[row] = free[np.argsort(away[free], kind="stable")][:wanted]
            continue
        same = (pool_labels == label).reshape(len(pool), -1).all(1).cpu().numpy()
        own = random.permutation(np.flatnonzero(same & ~copies[row]))
        others = random.permutation(np.flatnonzero(~same & ~copies[row]))
        chosen[row] = np.concatenate([own, others])[:wanted]
    return torch.from_numpy(chosen)


def _copies(originals: Tensor, pool: Tensor) -> Tensor:
    """Which rows of the pool (P, n) equal each original (N, n): booleans (N, P)."""
    # A few spread values rule out nearly all pairs; only the rest are compared in full.
    spread = slice(None, None, max(1, pool.shape[1] // 32))
    few = pool[:, spread].contiguous()
    copies = torch.stack([(few == original).all(1) for original in originals[:, spread]])
    for row, index in copies.nonzero().tolist():
        copies[row, index] = torch.equal(originals[row], pool[index])
    return copies
