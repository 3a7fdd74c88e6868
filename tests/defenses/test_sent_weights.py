"""The attacker who knows the weights that were sent out: closed forms against many digits and against integration."""

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.defenses.base import Facts
from fedveil.defenses.pnpm import PNPM
from fedveil.defenses.sent_weights import Range, _posteriors, cut_normal, likely_change
from fedveil.defenses.spm import SPM
from fedveil.federation.capture import step_weight
from fedveil.tree import Tree

from .laws import make_call


@pytest.mark.parametrize("low", [-40.0, -6.0, -1.0, 0.0, 0.3, 5.0, 36.0])
@pytest.mark.parametrize("width", [1e-9, 1e-5, 1e-2, 0.5, 3.0, 50.0])
def test_acut_normal_has_the_moments_that_many_digits_give_it(low, width):
    mass, mean, variance = cut_normal(*torch.tensor([[low], [low + width]], dtype=torch.float64))
    with mpmath.workdps(400):
        a, b = mpmath.mpf(low), mpmath.mpf(low + width)
        total = mpmath.ncdf(b) - mpmath.ncdf(a) if low < 0 else mpmath.ncdf(-a) - mpmath.ncdf(-b)
        at_a, at_b = mpmath.npdf(a) / total, mpmath.npdf(b) / total
        exact = at_a - at_b, 1 + a * at_a - b * at_b - (at_a - at_b) ** 2
        assert float(mass) == pytest.approx(float(mpmath.log(total)), abs=1e-5)
    assert float(mean) == pytest.approx(float(exact[0]), abs=1e-3 * min(width, 1))
    assert float(variance) == pytest.approx(float(exact[1]), rel=2e-2, abs=1e-6)


def test_far_from_the_mean_all_mass_is_at_the_near_end():
    mass, mean, variance = cut_normal(*torch.tensor([[-3e5, 2e4], [-2e4, 3e5]], dtype=torch.float64))
    assert mean.tolist() == [-2e4, 2e4]
    assert variance.tolist() == [0.0, 0.0]
    assert mass.isfinite().all()


@pytest.mark.parametrize("flip, high", [(0.43, 6.7), (0.13, 1.35), (0.02, 1.04)])
@pytest.mark.parametrize("value, start", [(0.5, 0.2), (0.5, -0.2), (0.03, 0.02), (-0.2, -0.19), (-0.05, 0.1)])
def test_what_is_expected_is_the_integral_over_all_that_may_have_been(flip, high, value, start):
    spread, grid = 0.1, np.linspace(value / high, value, 200_001)
    total, first, second = 0.0, 0.0, 0.0
    for sign, chance in ((1, 1 - flip), (-1, flip)):
        change = start - sign * grid
        density = chance * stats.norm(scale=spread).pdf(change)
        step = abs(grid[1] - grid[0])
        total += density.sum() * step
        first += (density * change).sum() * step
        second += (density * change**2).sum() * step
    one = torch.tensor([value], dtype=torch.float64), torch.tensor([start], dtype=torch.float64)
    found = _posteriors(*one, Range(1.0, high, flip), torch.tensor([spread], dtype=torch.float64))
    assert float(found[0].exp()) == pytest.approx(total, rel=1e-3)
    assert float(found[1]) == pytest.approx(first / total, rel=1e-3, abs=1e-6)
    assert float(found[2]) == pytest.approx(second / total, rel=1e-3)


@pytest.mark.parametrize(
    "defense", [SPM(epsilon=0.3), SPM(epsilon=1.9, debias=True), PNPM(epsilon=0.3), SPM(epsilon=2000)]
)
@pytest.mark.parametrize("size", [300, 120_000])  # in one piece, and in several
def test_the_estimate_beats_knowing_nothing_and_knows_how_sure_it_is(defense, size):
    generator = torch.Generator().manual_seed(0)
    before = 0.3 * torch.randn(size, generator=generator)
    change = 0.01 * torch.randn(size, generator=generator) * (torch.rand(size, generator=generator) < 0.5)
    sent = defense.protect(Tree({"w": (before - change)[None]}), make_call(clients=1))["w"][0]
    low, high = 1 / defense.divisor, (1 + defense.stretch) / defense.divisor
    found, sure = likely_change(sent, before, Range(low, high, defense.flip))
    assert (found - change).square().sum() < change.square().sum()
    assert ((sure >= 0) & (sure <= 1)).all()
    if size > 300 and defense.epsilon < 100:
        trusted = sure > 0.8
        assert trusted.sum() > 100
        right = (found - change)[trusted].square().sum() / change[trusted].square().sum()
        assert right < 0.4  # about 1 − sure, or less
        assert trusted.double().mean() < 0.3  # most weights hide their change
    if defense.epsilon > 100:
        torch.testing.assert_close(found, change, atol=1e-6, rtol=1e-3)


def test_a_zero_was_zero():
    before = torch.tensor([0.5, -0.2, 0.0, 0.3])
    found, sure = likely_change(torch.tensor([0.0, 0.0, 0.0, 0.9]), before, Range(1.0, 6.7, 0.43))
    assert found[:3].tolist() == before[:3].tolist()
    assert sure[:3].tolist() == [1.0, 1.0, 1.0]
    nothing, _ = likely_change(torch.zeros(4), torch.zeros(4), Range(1.0, 6.7, 0.43))
    assert not nothing.any()


@pytest.mark.parametrize("lr, steps, momentum", [(0.1, 1, 0.0), (0.1, 1, 0.9), (0.05, 7, 0.0), (0.05, 7, 0.9)])
def test_the_facts_tell_what_a_change_of_weights_was_divided_by(lr, steps, momentum):
    for kind in ("weights", "delta"):
        facts = Facts(kind=kind, lr=lr, steps=steps, momentum=momentum)
        assert facts.step_scale == pytest.approx(step_weight((lr,) * steps, momentum))
    assert Facts(lr=lr, steps=steps, momentum=momentum).step_scale == 1.0
