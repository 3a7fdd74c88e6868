"""All metrics of reconstructed pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedveil.leakage import metrics
from fedveil.leakage.assignment import assign, reorder
from fedveil.leakage.identified import identified
from fedveil.leakage.modality import Scores
from fedveil.leakage.pictures import Classifier, Pictures
from fedveil.leakage.truths import Truths
from fedveil.tasks.normalization import Normalization

MARKS = ("1/3", "2/3", "all")  # of the attack's steps, where SSIM is noted too


def score(pictures: Pictures, inputs: Tensor, truths: Truths, iterates: Sequence[Tensor] = ()) -> Scores:
    """Every metric of V victims' reconstructions (V, B, C, H, W), in the order of the originals.

    A diverged attack is not hidden: a pixel that is not finite counts as gray (0.5), the guess of an attacker who has
    nothing, and the image is flagged in `diverged`.
    """
    arranged, order = assign(inputs.float(), truths.originals)
    found, true = arranged.flatten(0, 1), truths.originals.flatten(0, 1)
    values = _values(pictures, found, true, truths.distractors)
    on_the_way: dict[str, dict[str, Tensor]] = {}
    if iterates:
        similar: dict[str, Tensor] = {}
        steps = (pictures.exhibit(reorder(each.float(), order).flatten(0, 1)) for each in iterates)
        true_pixels = pictures.exhibit(true)
        values["leakage_score"] = metrics.leakage_score(_noted(steps, true_pixels, len(iterates), similar), true_pixels)
        on_the_way["ssim"] = similar
    return Scores(values, pictures.exhibit(found), on_the_way)


def _values(pictures: Pictures, found: Tensor, true: Tensor, distractors: Tensor | None) -> dict[str, Tensor]:
    """The metrics of N reconstructions that stand beside their originals, (N, C, H, W) each."""
    normalization = pictures.to_pixels
    diverged = ~torch.isfinite(found).flatten(1).all(1).cpu()
    found = gray_gaps(found, normalization)

    def pixels(images: Tensor) -> Tensor:
        return normalization.pixels(images).clamp(0, 1)

    def shown(images: Tensor) -> Tensor:
        """Normalized images within the range of pixels: a network's answer to others means nothing."""
        return normalization.normalize(pixels(images))

    seen, expected = pixels(found), pixels(true)
    values = {
        "mse": metrics.mse(found, true),
        "psnr": metrics.psnr(found, true, normalization.std),
        "mse_pixel": metrics.mse_pixel(seen, expected),
        "psnr_pixel": metrics.psnr_pixel(seen, expected),
        "ssim": metrics.ssim(seen, expected),
    }
    if pictures.lpips is not None:
        values["lpips"] = pictures.lpips(seen, expected)
    reference = pictures.reference
    if reference is not None:
        values |= _judged(reference, shown(found), shown(true))
    if distractors is not None:
        values["identified"] = identified(found, true, distractors, features=pixels)
        if reference is not None:
            values["identified_features"] = identified(
                found, true, distractors, features=lambda images: reference.features(shown(images))
            )
    return values | {"diverged": diverged}


def _judged(reference: Classifier, found: Tensor, true: Tensor) -> dict[str, Tensor]:
    logits = [reference.logits(each) for each in (true, found)]
    return {
        "kl": metrics.kl(*logits),
        "feature_mse": metrics.feature_mse(reference.features(true), reference.features(found)),
        "logit_mse": metrics.logit_mse(*logits),
    }


def _noted(steps: Iterator[Tensor], true: Tensor, count: int, into: dict[str, Tensor]) -> Iterator[Tensor]:
    """Pass pictures (N, C, H, W) of pixels on, and note the SSIM after a third, two thirds and all of them."""
    # With one or two iterates several marks fall on the same one.
    marks = [(mark, max(round(count * part / 3) - 1, 0)) for part, mark in enumerate(MARKS, 1)]
    for place, step in enumerate(steps):
        if any(at == place for _, at in marks):
            similar = metrics.ssim(step, true)
            into.update({mark: similar for mark, at in marks if at == place})
        yield step


def gray_gaps(images: Tensor, normalization: Normalization) -> Tensor:
    """Normalized images with every pixel that is not finite replaced by the pixel 0.5."""
    gray = normalization.normalize(torch.full_like(images, 0.5))
    return torch.where(torch.isfinite(images), images, gray)
