"""Floors."""

import pytest
import torch

from fedveil.errors import FedveilError
from fedveil.leakage.floors import better_floor, mean_image


def test_mean_image() -> None:
    images = torch.rand(7, 3, 4, 5)
    torch.testing.assert_close(mean_image(images), images.sum(0) / 7)
    assert mean_image(images).dtype == torch.float32
    assert mean_image(torch.tensor([[[[0]]], [[[1]]]], dtype=torch.uint8)).item() == 0.5
    with pytest.raises(FedveilError, match="at least one"):
        mean_image(images[:0])


def test_the_better_floor_follows_the_metrics_direction() -> None:
    means = {"noise-floor": 0.2, "mean-floor": 0.7}
    assert better_floor("ssim", means) == "mean-floor"
    assert better_floor("mse", means) == "noise-floor"
    assert better_floor("ssim", {"noise-floor": 0.5, "mean-floor": 0.5}) == "noise-floor"
    assert better_floor("ssim", {"noise-floor": float("nan"), "mean-floor": -0.1}) == "mean-floor"
    with pytest.raises(FedveilError, match="no floor"):
        better_floor("ssim", {"noise-floor": float("nan")})
