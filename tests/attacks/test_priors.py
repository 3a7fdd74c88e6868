"""Priors against NumPy loops."""

import numpy as np
import pytest
import torch

from fedveil.attacks.priors import MeanSquare, TotalVariation, total_variation


def looped_variation(images):
    down, across = [], []
    for image in images.reshape(-1, *images.shape[-2:]):
        height, width = image.shape
        down += [abs(image[i + 1, j] - image[i, j]) for i in range(height - 1) for j in range(width)]
        across += [abs(image[i, j + 1] - image[i, j]) for i in range(height) for j in range(width - 1)]
    return (np.mean(down) if down else 0) + (np.mean(across) if across else 0)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(6, 4), (1, 5), (3, 1), (1, 1)])
def test_total_variation_equals_a_loop(channels, size):
    images = np.random.default_rng(0).normal(size=(2, channels, *size))
    live = torch.tensor(images, requires_grad=True)
    found = total_variation(live)
    np.testing.assert_allclose(found.item(), looped_variation(images), rtol=1e-12)
    (slope,) = torch.autograd.grad(found, live)
    assert torch.isfinite(slope).all()


def test_a_flat_image_has_no_variation_and_images_count_alike():
    torch.manual_seed(0)
    assert total_variation(torch.full((2, 3, 4, 4), 0.7)) == 0
    image = torch.randn(1, 1, 5, 5)
    torch.testing.assert_close(total_variation(image.expand(4, 3, 5, 5)), total_variation(image))


def test_mean_square():
    values = np.random.default_rng(1).normal(size=(2, 3, 4))
    np.testing.assert_allclose(MeanSquare(0.5)(torch.tensor(values)).item(), 0.5 * np.mean(values**2), rtol=1e-12)


def test_a_weighted_variation_leaves_what_is_no_picture_alone():
    images = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(TotalVariation(0.25)(images), 0.25 * total_variation(images))
    assert TotalVariation(0.25)(images.flatten(1)) == 0
