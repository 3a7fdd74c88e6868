"""FedCRAP: FedEM whose steps move only the pixels that the loss depends on most."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedveil.defenses.ball import top_share
from fedveil.defenses.fedem import FedEM
from fedveil.fields import KeepProbability, declared
from fedveil.registry import defenses
from fedveil.streams import Streams


@defenses.register("fedcrap")
@declared
class FedCRAP(FedEM):
    """Perturb, step by step, only the most sensitive share of every image, so that the loss gets lower.

    FedEM's loop with a mask M: at every step the `share` of each image's entries with the greatest |G|,
    G = ∇_δ L(w_u; x+δ), and δ ← Proj(δ − α·sign(M ⊙ G)). With `share=1` it is FedEM, bit for bit.

    Our reading: G is taken anew at x+δ in each step (the paper's G at the clean x would freeze the mask); the mask
    ranks magnitudes, as the text says (Eq. 7 thresholds signed values); the random start is multiplied by the first
    mask; the transform t(·) of Eq. 2 is the identity; Eq. 3 is never optimized; the number of steps, α and the norm,
    which the paper does not give, are FedEM's. The regions of several steps add up only at radii that a sign step does
    not overshoot, from about 1024/255 on, or with `step="relative"`.
    """

    place = "data"
    paper = "FedCRAP: Federated Critical-Region-Aware Perturbations for Refined Privacy-Preserving Federated Learning"
    weaknesses = (
        "Whoever inverts the gradient perfectly gets x+δ, within the radius of x: at 8/255 a visually exact copy.",
        "Pixels outside the masks go into the gradient as they are.",
        'With projection="masked" only the pixels of the last mask are bounded: δ may be longer than the radius.',
    )
    share: KeepProbability = 0.10  # τ in the paper: share of the pixels that are moved
    channels_together: bool = False  # rank pixels by the sum of |G| over their channels, and move all of them
    projection: Literal["delta", "masked"] = "delta"  # bound ‖δ‖ (our reading) or ‖M ⊙ δ‖ (the paper's Eq. 4)

    def _focus(self, slope: Tensor, real: Tensor | None) -> Tensor:
        return top_share(slope, self.share, channels_together=self._by_pixel(slope, 2), among=real)

    @property
    def moved_share(self) -> float:
        """τ: other entries may be moved in the next step, so this is the least."""
        return self.share

    def _project(self, delta: Tensor, focus: Tensor, streams: Streams) -> Tensor:
        if self.projection == "delta":
            return super()._project(delta, focus, streams)
        inside = super()._project(torch.where(focus, delta, 0.0), focus, streams)
        return torch.where(focus, inside, delta)

    def _by_pixel(self, values: Tensor, axes: int) -> bool:
        return self.channels_together and values.dim() == axes + 3
