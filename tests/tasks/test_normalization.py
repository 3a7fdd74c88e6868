from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import FedveilError
from fedveil.tasks.normalization import Normalization

COLOR = Normalization((0.4915, 0.4823, 0.4468), (0.2470, 0.2435, 0.2616))


@settings(deadline=None)  # others may share the machine
@given(
    mean=st.lists(st.floats(-1, 1), min_size=3, max_size=3),
    std=st.lists(st.floats(0.01, 2), min_size=3, max_size=3),
    lead=st.lists(st.integers(1, 3), max_size=2),
)
def test_pixels_undoes_normalize_for_any_leading_axes(mean: list[float], std: list[float], lead: list[int]) -> None:
    normalization = Normalization(tuple(mean), tuple(std))
    pixels = torch.rand(*lead, 3, 4, 5, dtype=torch.float64)
    assert torch.allclose(normalization.pixels(normalization.normalize(pixels)), pixels, atol=1e-12)


def test_each_channel_has_its_own_statistics() -> None:
    normalized = COLOR.normalize(torch.full((2, 3, 4, 4), 0.5))
    for channel in range(3):
        expected = (0.5 - COLOR.mean[channel]) / COLOR.std[channel]
        assert torch.allclose(normalized[:, channel], torch.tensor(expected))


def test_box_is_black_and_white() -> None:
    low, high = COLOR.box()
    assert low.shape == high.shape == (3, 1, 1)
    assert low.equal(COLOR.normalize(torch.zeros(3, 1, 1)))
    assert torch.allclose(COLOR.pixels(high), torch.ones(3, 1, 1))


def test_type_is_kept() -> None:
    assert COLOR.normalize(torch.rand(3, 2, 2, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    "mean, std",
    [((), ()), ((0.5,), (0.5, 0.5)), ((0.5,), (0.0,)), ((float("nan"),), (1.0,)), ((0.0,), (float("inf"),))],
)
def test_impossible_statistics_are_refused(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    with pytest.raises(FedveilError, match="normalization"):
        Normalization(mean, std)


def test_gray_statistics_do_not_spread_over_color_images() -> None:
    with pytest.raises(FedveilError, match="1 channel: expected"):
        Normalization((0.5,), (0.5,)).normalize(torch.rand(2, 3, 4, 4))
