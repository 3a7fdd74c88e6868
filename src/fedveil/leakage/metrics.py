"""Metrics of reconstructed images: pure functions, one value per image.

Images are tensors (N, C, H, W). *Normalized* ones are (pixel - mean) / std per channel; *pixels* are in [0, 1], and
functions that take pixels clamp them to that range first, as a display would. All are computed in float64 on the CPU
and without gradients: they measure, they are not losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# PSNR of two equal images is infinite. 100 dB is an error of 1e-5 of the pixel range: far below one gray level.
HIGHEST_PSNR = 100.0


def mse(x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of each image over all channels and pixels, in the space that the images are in."""
    x, y = _both(x, y)
    return (x - y).square().flatten(1).mean(1)


def psnr(x: Tensor, y: Tensor, std: Sequence[float]) -> Tensor:
    """Peak signal-to-noise ratio of normalized images, as the papers compute it; at most `HIGHEST_PSNR` dB.

    10·log10((1/std_c)² / MSE), averaged over the channels c, where MSE is that of the whole image. With one channel
    this is `psnr_pixel` without the clamping.
    """
    if len(std) != x.shape[-3]:
        raise ValueError(f"{x.shape[-3]} channels need as many standard deviations, got {len(std)}")
    peak = 1 / torch.tensor(std, dtype=torch.float64)
    return _decibels(peak.square() / mse(x, y).unsqueeze(1)).mean(1).clamp(max=HIGHEST_PSNR)


def mse_pixel(x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of each image in pixels."""
    return mse(x.clamp(0, 1), y.clamp(0, 1))


def psnr_pixel(x: Tensor, y: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in pixels, data range 1; at most `HIGHEST_PSNR` dB."""
    return _decibels(1 / mse_pixel(x, y)).clamp(max=HIGHEST_PSNR)


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """Structural similarity (Wang et al., 2004) of pixels: per channel, then the mean over channels.

    Gaussian window of 11×11 with σ = 1.5, K1 = 0.01, K2 = 0.03, data range 1, population covariance. Only windows
    that lie wholly inside the image count, as in scikit-image, so no padding enters. Images under 11 pixels get the
    largest odd window that fits, with the same σ.

    Not torchmetrics: it takes seconds to import, for what are these few lines.
    """
    x, y = _both(x.clamp(0, 1), y.clamp(0, 1))
    height, width = x.shape[-2:]
    side = min(11, height, width)
    side -= 1 - side % 2
    offsets = torch.arange(side, dtype=torch.float64) - side // 2
    window = torch.exp(-offsets.square() / (2 * 1.5**2))
    window /= window.sum()

    def sliding(length: int) -> Tensor:
        """The window at each place along an axis, one row per place. As a product it is faster than a conv2d here."""
        places = torch.arange(length - side + 1).unsqueeze(1) + torch.arange(side)
        empty = torch.zeros(len(places), length, dtype=torch.float64)
        return empty.scatter(1, places, window.expand(places.shape))

    down, across = sliding(height), sliding(width).T

    def blur(images: Tensor) -> Tensor:
        return down @ images @ across

    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (var_x + var_y + c2)
    return (luminance * structure).flatten(1).mean(1)


def leakage_score(iterates: Iterable[Tensor], original: Tensor) -> Tensor:
    """FedEM's Eq. 9 per image: 1 - mean over the attack's iterates of ‖x_i - x‖ / √n, floored at 0.

    `iterates` are pixels (N, C, H, W), read one at a time. √n, with n = C·H·W, is the diameter of the pixel cube (D in
    the paper). Without iterates nothing was attacked and the score is 0.
    """
    distances = [mse_pixel(iterate, original).sqrt() for iterate in iterates]  # ‖·‖/√n is the root of the MSE
    if not distances:
        return torch.zeros(len(original), dtype=torch.float64)
    return (1 - torch.stack(distances).mean(0)).clamp(min=0)


def rdlv(similarity_reconstruction: Tensor, similarity_prior: Tensor, *, smallest: float = 0.01) -> Tensor:
    """Relative data leakage value: (similarity of the reconstruction - of the prior) / similarity of the prior.

    The prior is what the attacker has without the update. Its similarity may be 0 or below (SSIM can be), which would
    blow the ratio up or turn its sign; the divisor is therefore never less than `smallest`, and the sign is always
    that of the difference.
    """
    found, prior = _both(similarity_reconstruction, similarity_prior)
    return (found - prior) / prior.clamp(min=smallest)


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(P ‖ Q) in nats of a classifier's softmax: P of the originals, Q of the reconstructions, both (N, classes)."""
    p, q = (each.log_softmax(1) for each in _both(p_logits, q_logits))
    return (p.exp() * (p - q)).sum(1).clamp(min=0)  # rounding can take equal ones below 0


def feature_mse(x_features: Tensor, y_features: Tensor) -> Tensor:
    """Mean squared difference of a network's features of each image, (N, ...): those before its last layer."""
    return mse(x_features, y_features)


def logit_mse(x_logits: Tensor, y_logits: Tensor) -> Tensor:
    """Mean squared difference of a classifier's scores (N, classes): the feature distance of Inverting Gradients."""
    return mse(x_logits, y_logits)


def _both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    # Broadcasting would silently compare every image with the same one.
    if x.shape != y.shape:
        raise ValueError(f"the two must have the same shape: {tuple(x.shape)} and {tuple(y.shape)}")
    return x.detach().to("cpu", torch.float64), y.detach().to("cpu", torch.float64)


def _decibels(ratio: Tensor) -> Tensor:
    return 10 * torch.log10(ratio)
