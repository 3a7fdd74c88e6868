"""Spans of gradients with noise, and with entries that are missing."""

from __future__ import annotations

import pytest
import torch

from fedveil.attacks.span import Span, filled


def low_rank(rank: int = 5, sides: tuple[int, int] = (120, 60)) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(rank, sides[1], generator=random, dtype=torch.float64)
    return torch.randn(sides[0], rank, generator=random, dtype=torch.float64) @ inputs, inputs


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.1])
def test_the_rank_comes_from_the_noise(noise: float) -> None:
    matrix, inputs = low_rank()
    drawn = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    span = Span.of((matrix + noise * drawn).float())
    assert span.rank == 5
    assert span.clean is (noise == 0)
    if noise:
        assert span.noise == pytest.approx(noise, rel=0.1)
    assert float(span.outside(inputs).max()) < max(1e-9, 10 * noise**2)
    others = torch.randn(20, 60, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert float(span.outside(others).min()) > 0.7


def test_noise_alone_has_no_rank() -> None:
    assert Span.of(torch.randn(120, 60, generator=torch.Generator().manual_seed(2))).rank == 0


def test_missing_entries_are_filled_in() -> None:
    matrix, inputs = low_rank()
    there = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(4)) > 0.25
    assert float((filled(matrix, there) - matrix).norm() / matrix.norm()) < 1e-3
    damaged = torch.where(there, matrix, 0.0)
    informed, naive = Span.of(damaged, there.double()), Span.of(damaged)
    assert float(informed.outside(inputs).max()) < 1e-4
    assert float(naive.outside(inputs).max()) > 1e-3
