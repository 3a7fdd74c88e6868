"""Diffusion against its closed forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.attacks.denoiser import Denoiser, unit_of
from fedveil.attacks.diffusion import Diffusion
from fedveil.attacks.principal import Principal

STEPS = Diffusion()


def test_the_schedule_is_the_published_one():
    assert STEPS.betas[[1, 1000]].tolist() == pytest.approx([1e-4, 0.02])
    assert float(STEPS.betas[501] - STEPS.betas[500]) == pytest.approx((0.02 - 1e-4) / 999)
    assert float(STEPS.kept[2]) == pytest.approx((1 - 1e-4) * (1 - 1e-4 - (0.02 - 1e-4) / 999))
    assert float(STEPS.kept[0]) == 1


@pytest.mark.parametrize("step", [1, 30, 400])
def test_forward_has_the_mean_and_variance_of_its_law(step):
    row, count = torch.tensor([[2.0, -1.0, 0.0]]), 40_000
    noise = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    made = STEPS.forward(row.expand(count, 3), torch.full((count,), step), noise)
    # One step at a time, with noise of its own each, comes to the same law.
    mean, variance = row[0].double(), 0.0
    for each in range(1, step + 1):
        beta = float(STEPS.betas[each])
        mean, variance = (1 - beta) ** 0.5 * mean, (1 - beta) * variance + beta
    assert torch.allclose(made.double().mean(0), mean, atol=5 * (variance / count) ** 0.5)
    assert torch.allclose(made.double().var(0), torch.full((3,), variance).double(), rtol=0.04)


@pytest.mark.parametrize("start", [1, 2, 50, 1000])
def test_the_way_back_with_the_truth_at_every_step_ends_at_the_truth(start):
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()
    noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).double()
    begun = STEPS.forward(rows, torch.full((4,), start), noise)
    drawn = torch.Generator().manual_seed(3)
    assert torch.allclose(STEPS.back(begun, start, lambda x, step: rows), rows)
    noisy = STEPS.back(begun, start, lambda x, step: rows, lambda step: torch.randn(4, 6, generator=drawn).double())
    assert torch.allclose(noisy, rows)


def test_steps_back_are_chained():
    met = []

    def denoise(x, step):
        met.append((step, x.clone()))
        return torch.zeros_like(x)

    STEPS.back(torch.ones(1, 2), 5, denoise)
    assert [step for step, _ in met] == [5, 4, 3, 2, 1]
    sizes = [float(x[0, 0]) for _, x in met]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 5


def test_without_noise_the_chain_comes_to_the_mean_of_gaussian_rows():
    """For rows of variance v the best estimate at step t is √ᾱ·v/(ᾱ·v + 1 − ᾱ) times what is seen."""
    variance, start = torch.tensor([4.0, 0.5, 0.01]).double(), 60

    def best(x, step):
        kept = STEPS.kept[step]
        return kept.sqrt() * variance / (kept * variance + 1 - kept) * x

    seen = torch.tensor([[1.0, -2.0, 0.3]]).double()
    assert torch.allclose(STEPS.back(seen, start, best), best(seen, start), rtol=1e-9)


def test_with_noise_the_chain_draws_from_what_the_rows_may_have_been():
    variance, start, count = 0.5, 250, 20_000
    source = torch.Generator().manual_seed(4)

    def best(x, step):
        kept = STEPS.kept[step]
        return kept.sqrt() * variance / (kept * variance + 1 - kept) * x

    seen = torch.full((count, 1), 0.7).double()
    drawn = STEPS.back(seen, start, best, lambda step: torch.randn(count, 1, generator=source).double())
    kept = float(STEPS.kept[start])
    spread = variance * (1 - kept) / (kept * variance + 1 - kept)
    assert float(drawn.mean()) == pytest.approx(float(best(seen[:1], start)), abs=5 * (spread / count) ** 0.5)
    assert float(drawn.var()) == pytest.approx(spread, rel=0.05)


@given(st.floats(0, 200), st.floats(0, 200))
def test_more_noise_starts_later(one, other):
    low, high = sorted((one, other))
    assert STEPS.start(low) <= STEPS.start(high)


@given(st.floats(0, 150))
def test_the_start_is_the_first_step_with_as_much_noise(level):
    start = STEPS.start(level)
    assert level == 0 or start > 0
    noise = [((1 - float(kept)) / float(kept)) ** 0.5 for kept in STEPS.kept]
    assert noise[start] >= level * (1 - 1e-9)
    assert start == 0 or noise[start - 1] < level * (1 + 1e-9)


def test_no_noise_starts_nowhere_and_too_much_at_the_end():
    assert STEPS.start(0.0) == 0
    assert STEPS.start(1e9) == 1000
    assert STEPS.start(float(STEPS.levels[77])) == 77


def test_principal_directions_are_those_of_the_rows():
    source = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(40, 3, generator=source)).Q
    rows = torch.randn(500, 3, generator=source) * torch.tensor([5.0, 2.0, 1.0]) @ basis.T + 7
    found = Principal.of(rows, 10)
    assert len(found.variances) == 3
    assert found.rest < 1e-6
    assert torch.allclose(found.directions.T @ found.directions, torch.eye(3), atol=1e-4)
    exact = torch.linalg.eigvalsh(torch.cov(rows.T.double()))[-3:].flip(0).float()
    assert torch.allclose(found.variances, exact, rtol=1e-3)
    assert torch.allclose(found.remainder(rows, found.coordinates(rows)), torch.zeros_like(rows), atol=1e-3)


def test_a_gaussian_denoiser_is_the_best_linear_one():
    """Rows of known variances in all directions, with noise: what is left is what theory says."""
    source = torch.Generator().manual_seed(2)
    spreads = torch.cat([torch.tensor([3.0, 1.0]), torch.full((28,), 0.1)])
    rows = torch.randn(2600, 30, generator=source) * spreads
    principal = Principal.of(rows[:600], 2)
    denoiser = Denoiser(principal, unit_of(principal), Diffusion(), {})
    noisy = rows[600:] + 0.5 * torch.randn(2000, 30, generator=source)
    found, start = denoiser.denoised(noisy, 0.5)
    assert start == STEPS.start(0.5 / unit_of(principal))
    left = (found - rows[600:]).square().mean(0)
    theory = spreads.square() * 0.25 / (spreads.square() + 0.25)
    assert torch.allclose(left, theory, rtol=0.15)
    assert denoiser.denoised(noisy, 0.0)[0] is noisy
