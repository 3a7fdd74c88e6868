"""Metrics against scikit-image, the inversion literature's own code, and their closed forms."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from fedveil.leakage import metrics
from fedveil.tasks.normalization import Normalization

CIFAR_STD = (0.2470, 0.2435, 0.2616)
CIFAR = Normalization((0.4915, 0.4823, 0.4468), CIFAR_STD)


def pictures(count: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(seed))


def noisy(images: Tensor, scale: float, seed: int = 1) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return (images + scale * noise).clamp(0, 1)


def skimage_ssim(x: Tensor, y: Tensor) -> float:
    return structural_similarity(  # type: ignore[no-any-return]
        x.double().numpy(),
        y.double().numpy(),
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
        data_range=1,
        channel_axis=0,
    )


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 11, 11), (2, 17, 40)])
@pytest.mark.parametrize("scale", [0.0, 0.01, 0.1, 1.0])
def test_ssim_equals_scikit_image(shape: tuple[int, int, int], scale: float) -> None:
    x = pictures(4, *shape)
    y = noisy(x, scale)
    expected = [skimage_ssim(one, other) for one, other in zip(x, y, strict=True)]
    np.testing.assert_allclose(metrics.ssim(x, y), expected, atol=1e-9)


@pytest.mark.parametrize("height, width, side", [(8, 8, 7), (10, 30, 9), (5, 7, 5), (2, 4, 1), (1, 1, 1)])
def test_ssim_of_small_images_uses_the_largest_odd_window_that_fits(height: int, width: int, side: int) -> None:
    x, y = pictures(2, 2, height, width), pictures(2, 2, height, width, seed=5)
    offsets = np.arange(side) - side // 2
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None, :] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()

    def window_ssim(a: np.ndarray, b: np.ndarray) -> float:
        mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
        var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
        covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
        return ((2 * mean_a * mean_b + 1e-4) * (2 * covariance + 9e-4)) / (
            (mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4)
        )

    for image in range(2):
        values = [
            window_ssim(
                x[image, channel, top : top + side, left : left + side].double().numpy(),
                y[image, channel, top : top + side, left : left + side].double().numpy(),
            )
            for channel in range(2)
            for top in range(height - side + 1)
            for left in range(width - side + 1)
        ]
        assert metrics.ssim(x, y)[image].item() == pytest.approx(np.mean(values), abs=1e-9)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_psnr_pixel_equals_scikit_image(shape: tuple[int, int, int]) -> None:
    x = pictures(3, *shape)
    y = noisy(x, 0.2)
    expected = [
        peak_signal_noise_ratio(a.double().numpy(), b.double().numpy(), data_range=1) for a, b in zip(x, y, strict=True)
    ]
    np.testing.assert_allclose(metrics.psnr_pixel(x, y), expected, atol=1e-9)


def test_psnr_is_that_of_the_inverting_gradients_code() -> None:
    x, y = pictures(5, 3, 9, 9), pictures(5, 3, 9, 9, seed=3)
    x, y = (CIFAR.normalize(each).double() for each in (x, y))
    factor = 1 / torch.tensor(CIFAR_STD, dtype=torch.float64).view(3, 1, 1)
    # Geiping et al.: factor² / mse of the whole image, a value per channel, then the mean.
    expected = torch.stack(
        [(10 * torch.log10(factor**2 / (a - b).square().mean())).mean() for a, b in zip(x, y, strict=True)]
    )
    torch.testing.assert_close(metrics.psnr(x, y, CIFAR_STD), expected)


def test_psnr_with_one_channel_is_psnr_pixel() -> None:
    x, y = pictures(4, 1, 12, 12), pictures(4, 1, 12, 12, seed=8)
    normalized = [Normalization((0.1307,), (0.3081,)).normalize(each.double()) for each in (x, y)]
    torch.testing.assert_close(metrics.psnr(*normalized, [0.3081]), metrics.psnr_pixel(x, y))


def test_constant_images_score_their_closed_forms() -> None:
    black, white = torch.zeros(1, 1, 12, 12), torch.ones(1, 1, 12, 12)
    assert metrics.mse_pixel(black, white).item() == 1
    assert metrics.psnr_pixel(black, white).item() == 0
    assert metrics.psnr_pixel(black, black + 0.1).item() == pytest.approx(20)
    assert metrics.ssim(black, white).item() == pytest.approx(1e-4 / (1 + 1e-4))
    assert metrics.mse(torch.full((1, 1, 2, 2), 3.0), torch.full((1, 1, 2, 2), 1.0)).item() == 4


def test_pixel_metrics_clamp_and_the_normalized_ones_do_not() -> None:
    x, y = torch.full((1, 1, 4, 4), 3.0), torch.ones(1, 1, 4, 4)
    assert metrics.mse_pixel(x, y).item() == 0
    assert metrics.ssim(x, y).item() == pytest.approx(1)
    assert metrics.mse(x, y).item() == 4


def test_psnr_of_equal_images_is_the_cap() -> None:
    x = pictures(2, 3, 8, 8)
    assert metrics.psnr(x, x, CIFAR_STD).tolist() == [metrics.HIGHEST_PSNR] * 2
    assert metrics.psnr_pixel(x, x).tolist() == [metrics.HIGHEST_PSNR] * 2


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    channels=st.integers(1, 3),
    height=st.integers(3, 16),
    width=st.integers(3, 16),
    scale=st.floats(0, 2),
)
def test_laws(seed: int, channels: int, height: int, width: int, scale: float) -> None:
    x = pictures(3, channels, height, width, seed)
    y = noisy(x, scale, seed + 1)
    std = [0.3] * channels
    for distance in (metrics.mse, metrics.mse_pixel):
        torch.testing.assert_close(distance(x, y), distance(y, x))
        assert (distance(x, y) >= 0).all()
        assert (distance(x, x) == 0).all()
    for similarity in (metrics.psnr_pixel, metrics.ssim, lambda a, b: metrics.psnr(a, b, std)):
        torch.testing.assert_close(similarity(x, y), similarity(y, x))
        assert (similarity(x, x) >= similarity(x, y)).all()
        # An image's value depends on that image alone.
        torch.testing.assert_close(similarity(x, y)[1:2], similarity(x[1:2], y[1:2]))
    assert (metrics.ssim(x, y).abs() <= 1 + 1e-12).all()
    torch.testing.assert_close(metrics.ssim(x, x), torch.ones(3, dtype=torch.float64))


def test_a_peak_for_each_channel() -> None:
    x = pictures(2, 3, 4, 4)
    with pytest.raises(ValueError, match="3 channels"):
        metrics.psnr(x, x, [0.5])


def test_leakage_score() -> None:
    original = torch.zeros(2, 3, 4, 4)
    opposite, half = torch.ones_like(original), torch.full_like(original, 0.5)
    assert metrics.leakage_score(original[None], original).tolist() == [1, 1]
    assert metrics.leakage_score(opposite[None] * 9, original).tolist() == [0, 0]  # clamped to the pixel cube
    assert metrics.leakage_score(torch.stack([opposite, half, original]), original).tolist() == [0.5, 0.5]
    assert metrics.leakage_score([], original).tolist() == [0, 0]
    iterates = torch.rand(5, 2, 3, 4, 4)
    literal = 1 - (iterates - original).flatten(2).norm(dim=2).mean(0) / math.sqrt(3 * 4 * 4)
    torch.testing.assert_close(metrics.leakage_score(iterates, original).float(), literal)


def test_rdlv() -> None:
    found = torch.tensor([0.6, 0.2, 0.3, 0.1, -0.2])
    prior = torch.tensor([0.2, 0.2, 0.0, -0.3, -0.1])
    values = metrics.rdlv(found, prior)
    assert values[:2].tolist() == pytest.approx([2, 0])
    assert torch.isfinite(values).all()
    assert torch.equal(values.sign(), (found - prior).sign().double())


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="same shape"):
        metrics.mse(torch.zeros(3, 1, 4, 4), torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_kl_equals_scipy(scale: float) -> None:
    p, q = (scale * torch.randn(6, 10, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    expected = rel_entr(softmax(p.double().numpy(), 1), softmax(q.double().numpy(), 1)).sum(1)
    np.testing.assert_allclose(metrics.kl(p, q), expected, rtol=1e-9)
    assert (metrics.kl(p, p) == 0).all()
    assert not torch.allclose(metrics.kl(p, q), metrics.kl(q, p))  # the originals' distribution comes first


def test_kl_of_sure_judgments_stays_finite() -> None:
    p, q = torch.tensor([[1e4, 0.0]]), torch.tensor([[0.0, 1e4]])
    assert metrics.kl(p, q).tolist() == [1e4]
    # ln 2 more for the first than for the second class: KL((2/3, 1/3) ‖ (1/2, 1/2)) in closed form
    found = metrics.kl(torch.tensor([[math.log(2), 0.0]], dtype=torch.float64), torch.zeros(1, 2))
    assert found.item() == pytest.approx(2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3))


@pytest.mark.parametrize("metric", [metrics.feature_mse, metrics.logit_mse])
def test_distances_of_features_equal_numpy(metric: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = (torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    expected = ((x.double().numpy() - y.double().numpy()) ** 2).mean(1)
    np.testing.assert_allclose(metric(x, y), expected)
    with pytest.raises(ValueError, match="same shape"):
        metric(x, y[:1])
