"""`identified`: does the reconstruction point to the right person's picture? The number a non-expert can read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import FedveilError

CHUNK_VALUES = 2**23  # numbers held at a time: 64 MB of float64


def candidates(
    originals: Tensor, labels: Tensor, pool: Tensor, pool_labels: Tensor, *, count: int = 100, seed: int = 0
) -> Tensor:
    """Choose each original's distractors from held-out images: indices into `pool`, shape (N, count - 1).

    Drawn without repetition from the original's own class; where that has too few, the rest comes from other classes.
    Labels may be class numbers (N,) or rows of several labels (N, L), of the same class when all agree. An exact copy
    of the original is never chosen. An original's draw depends on the seed and its position alone.

    When the pool has fewer than `count` - 1 images to offer, every original gets as many as there are: chance is
    always 1 / (indices.shape[1] + 1). An empty pool raises a `FedveilError`.
    """
    if count < 2:
        raise FedveilError(f"identification needs at least 2 candidates, got {count}")
    copies = _copies(originals.flatten(1), pool.flatten(1)).cpu().numpy()
    wanted = min(count - 1, int((~copies).sum(1).min()))
    if wanted < 1:
        raise FedveilError("identification needs held-out images that differ from the originals, and the pool has none")
    chosen = np.empty((len(originals), wanted), dtype=np.int64)
    for row, label in enumerate(labels):
        same = (pool_labels == label).reshape(len(pool), -1).all(1).cpu().numpy()
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, row])))
        own = random.permutation(np.flatnonzero(same & ~copies[row]))
        others = random.permutation(np.flatnonzero(~same & ~copies[row]))
        chosen[row] = np.concatenate([own, others])[:wanted]
    return torch.from_numpy(chosen)


@torch.no_grad()
def identified(
    reconstructions: Tensor,
    originals: Tensor,
    distractors: Tensor,
    *,
    features: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Whether each reconstruction is nearer to its original than to any of its distractors: booleans (N,).

    Reconstructions and originals are (N, C, H, W), distractors (N, M, C, H, W).
    Nearness is the L2 distance, of the images as given or of what `features` makes of a batch of them. A tie is not an
    identification: the attacker could not tell the two apart, and the order of the candidates must not decide. Nor is
    a reconstruction that is not finite.
    """
    if distractors.dim() != originals.dim() + 1 or reconstructions.shape != originals.shape:
        raise ValueError(
            "need reconstructions and originals (N, ...) and distractors (N, M, ...): "
            f"{tuple(reconstructions.shape)}, {tuple(originals.shape)} and {tuple(distractors.shape)}"
        )
    if distractors.shape[1] < 1:
        raise FedveilError("identification needs at least one distractor per image")
    # The reconstruction and its candidates go through `features` together, so equal images get equal features.
    together = distractors.shape[1] + 2
    step = max(1, CHUNK_VALUES // (together * max(1, originals[0].numel()))) if len(originals) else 1
    verdicts = []
    for start in range(0, len(originals), step):
        part = slice(start, start + step)
        images = torch.cat([reconstructions[part, None], originals[part, None], distractors[part]], dim=1)
        flat = images.flatten(0, 1)
        seen = (features(flat) if features else flat).to("cpu", torch.float64).reshape(len(images), together, -1)
        distance = (seen[:, 1:] - seen[:, :1]).square().sum(-1)
        verdicts.append(distance[:, 0] < distance[:, 1:].amin(1))  # false when either is NaN
    return torch.cat(verdicts) if verdicts else torch.zeros(0, dtype=torch.bool)


def _copies(originals: Tensor, pool: Tensor) -> Tensor:
    """Which rows of the pool (P, n) equal each original (N, n): booleans (N, P)."""
    # A few spread values rule out nearly all pairs; only the rest are compared in full.
    spread = slice(None, None, max(1, pool.shape[1] // 32))
    few = pool[:, spread].contiguous()
    copies = torch.stack([(few == original).all(1) for original in originals[:, spread]])
    for row, index in copies.nonzero().tolist():
        copies[row, index] = torch.equal(originals[row], pool[index])
    return copies
