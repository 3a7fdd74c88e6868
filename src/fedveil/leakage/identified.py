"""`identified`: does the reconstruction point to the right person's picture? The number a non-expert can read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedveil.errors import FedveilError

CHUNK_VALUES = 2**23  # numbers held at a time: 64 MB of float64


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
