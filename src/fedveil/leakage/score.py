"""All metrics of a row of reconstructions in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedveil.leakage import metrics
from fedveil.leakage.identified import identified


class Classifier(Protocol):
    """A classifier to compare pictures by, such as `reference(task)`. It takes normalized images."""

    def features(self, images: Tensor) -> Tensor: ...

    def logits(self, images: Tensor) -> Tensor: ...


def score(
    reconstructions: Tensor,
    originals: Tensor,
    mean: Tensor | Sequence[float],
    std: Tensor | Sequence[float],
    distractors: Tensor | None = None,
    *,
    features: Callable[[Tensor], Tensor] | None = None,
    reference: Classifier | None = None,
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None,
    iterates: Tensor | Iterable[Tensor] | None = None,
    attack_loss: Tensor | None = None,
    prior_ssim: Tensor | None = None,
) -> dict[str, Tensor]:
    """Every metric of N reconstructions, one value per image: tensors (N,) on the CPU, named as in the catalog.

    All images are normalized, (N, C, H, W), and already assigned to their originals (see `assign`).

    distractors: (N, M, C, H, W), adds `identified`; with `features` (of normalized images) `identified_features` too.
    reference: adds `kl`, `feature_mse` and `logit_mse`; its features serve for `features` when none are given.
    lpips: a distance of pixels (see `fedveil.leakage.lpips.load`); adds `lpips`.
    iterates: the attack's intermediate images, (I, N, C, H, W) or an iterable of (N, C, H, W); adds `leakage_score`.
    attack_loss: the final matching cost per image (N,).
    prior_ssim: the floor's `ssim` of each image (N,); adds `rdlv`.

    Yes-or-no metrics (`identified`, `diverged`) are booleans, which is how `bootstrap` knows them as shares.

    A diverged attack is not hidden: a pixel that is not finite counts as gray (0.5), the guess of an attacker who has
    nothing, and a cost that is not finite counts as the largest finite one; the image is flagged in `diverged`. When
    no cost is finite, `attack_loss` is left out.
    """
    diverged = ~torch.isfinite(reconstructions).flatten(1).all(1).cpu()
    found = gray_gaps(reconstructions, mean, std)

    def pixels(images: Tensor) -> Tensor:
        return metrics.to_pixels(images, mean, std).clamp(0, 1)

    def shown(images: Tensor) -> Tensor:
        """Normalized images within the range of pixels: a network's answer to others means nothing."""
        return metrics.from_pixels(pixels(images), mean, std)

    seen, true = pixels(found), pixels(originals)
    values = {
        "mse": metrics.mse(found, originals),
        "psnr": metrics.psnr(found, originals, std),
        "mse_pixel": metrics.mse_pixel(seen, true),
        "psnr_pixel": metrics.psnr_pixel(seen, true),
        "ssim": metrics.ssim(seen, true),
    }
    if lpips is not None:
        values["lpips"] = lpips(seen, true)
    if reference is not None:
        values |= _judged(reference, shown(found), shown(originals))
        features = features or reference.features
    if distractors is not None:
        values["identified"] = identified(found, originals, distractors, features=pixels)
        if features is not None:
            values["identified_features"] = identified(
                found, originals, distractors, features=lambda x: features(shown(x))
            )
    if iterates is not None:
        steps = (pixels(gray_gaps(iterate, mean, std)) for iterate in iterates)
        values["leakage_score"] = metrics.leakage_score(steps, true)
    if prior_ssim is not None:
        values["rdlv"] = metrics.rdlv(values["ssim"], prior_ssim)
    if attack_loss is not None:
        cost = attack_loss.detach().to("cpu", torch.float64)
        finite = torch.isfinite(cost)
        diverged = diverged | ~finite
        if finite.any():
            values["attack_loss"] = torch.where(finite, cost, cost[finite].max())
    return values | {"diverged": diverged}


def _judged(reference: Classifier, found: Tensor, true: Tensor) -> dict[str, Tensor]:
    logits = [reference.logits(each) for each in (true, found)]
    return {
        "kl": metrics.kl(*logits),
        "feature_mse": metrics.feature_mse(reference.features(true), reference.features(found)),
        "logit_mse": metrics.logit_mse(*logits),
    }


def gray_gaps(images: Tensor, mean: Tensor | Sequence[float], std: Tensor | Sequence[float]) -> Tensor:
    """Normalized images with every pixel that is not finite replaced by the pixel 0.5."""
    gray = metrics.from_pixels(torch.full_like(images, 0.5), mean, std)
    return torch.where(torch.isfinite(images), images, gray)
