"""The algebra of gradient rows: what is made of known inputs and sparse effects comes apart again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.attacks.linear_inputs import (
    Valid,
    lone_differences,
    lone_rows,
    outside,
    recover_inputs,
    span_of,
    sparse_directions,
    trusted_rows,
    unmixed,
)

ROUNDING = 1e-13
BOX = Valid(torch.zeros(40).double(), torch.ones(40).double())


def made(seed, batch, units=96, active=0.5):
    """(inputs (B, 40) in [0, 1], effects (B, units) that are zero where a unit is not active, the rows)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(batch, 40, generator=generator, dtype=torch.float64)
    effects = torch.randn(batch, units, generator=generator, dtype=torch.float64)
    effects *= torch.rand(batch, units, generator=generator) < active
    return inputs, effects, rows_of(inputs, effects)


def rows_of(inputs, effects):
    return effects.T @ torch.cat([inputs, torch.ones(len(inputs), 1).double()], 1)


def recovered(rows, batch, box=BOX, noise=ROUNDING, tries=2**13):
    span = span_of(rows, batch, noise)
    return span, recover_inputs(span, box, tries, torch.Generator().manual_seed(1))


def distance(found, inputs):
    """For every true input how far the nearest found one is."""
    return torch.cdist(inputs, found).amin(1)


@given(st.integers(0, 2**20), st.integers(1, 7), st.floats(0.3, 0.6))
def test_inputs_behind_sparse_effects_come_back_exactly(seed, batch, active):
    inputs, effects, rows = made(seed, batch, active=active)
    span, found = recovered(rows, batch)
    assert span.rank == batch
    assert found.complete
    assert distance(found.inputs, inputs).max() < 1e-8
    torch.testing.assert_close(rows_of(found.inputs, found.effects), rows, rtol=0, atol=1e-8)
    if batch > 1:  # what is inactive is exactly zero
        assert int((found.effects != 0).sum()) == int((effects != 0).sum())


@given(st.integers(0, 2**20), st.integers(2, 5))
def test_without_a_valid_range_sparsity_alone_decides(seed, batch):
    inputs, _, rows = made(seed, batch)
    assert distance(recovered(rows, batch, box=None)[1].inputs, inputs).max() < 1e-8


@given(st.integers(0, 2**20), st.integers(2, 5))
def test_dense_effects_are_not_said_to_be_solved(seed, batch):
    """As behind a sigmoid: the rows are mixtures, and no direction is sparse."""
    _, _, rows = made(seed, batch, active=1.0)
    assert not recovered(rows, batch, tries=256)[1].complete


def test_the_rank_tells_repeated_inputs():
    inputs, effects, _ = made(3, 4)
    inputs[3], effects[3] = inputs[1], 0.7 * effects[1]
    span, found = recovered(rows_of(inputs, effects), 4)
    assert span.rank == 3
    assert distance(found.inputs, inputs).max() < 1e-8
    noisy = rows_of(inputs, effects) + 1e-6 * torch.randn(96, 41, generator=torch.Generator().manual_seed(0))
    assert span_of(noisy, 4, ROUNDING).rank == 3


def test_the_rank_of_a_batch_is_its_size_at_most():
    _, _, rows = made(5, 6)
    assert span_of(rows, 4, ROUNDING).rank == 4


def test_mixtures_of_two_examples_are_taken_apart():
    """Two examples that are mostly active together: a mixture of them is nearly as sparse as each."""
    _, effects, _ = made(7, 3)
    effects[1] = torch.where(torch.arange(96) < 60, (effects[0] != 0) * effects[1].abs().add(0.1), effects[1])
    left = 1e9 * effects.T
    mixed = torch.eye(3).double()
    mixed[0, 1], mixed[2, 0] = 0.7, -0.4
    pure = unmixed(left, torch.nn.functional.normalize(mixed, dim=1))
    # One entry per direction: each is one example's effect.
    assert ((pure.abs() > 1e-9).sum(1) == 1).all()
    assert ((pure.abs() > 1e-9).sum(0) == 1).all()


def test_an_almost_pure_copy_of_another_direction_is_taken_apart():
    _, effects, _ = made(8, 2)
    left = 1e9 * effects.T
    near = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 2e-4]]).double(), dim=1)
    pure = unmixed(left, near)
    assert pure[1, 0].abs() < 1e-9 * pure[1, 1].abs()


def test_sparse_directions_need_inputs_in_the_valid_range():
    _, effects, _ = made(9, 3)
    left = 1e9 * effects.T
    generator = torch.Generator().manual_seed(0)
    assert sparse_directions(left, lambda directions: 0.0, 512, generator) is not None
    assert sparse_directions(left, lambda directions: 0.5, 512, generator) is None


def test_hopeless_searches_are_not_begun():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert sparse_directions(1e9 * made(9, 30)[1].T, lambda directions: 0.0, 2**10, generator) is None
    assert torch.equal(generator.get_state(), before)


def test_rows_of_one_active_example_show_it():
    inputs, effects, rows = made(11, 3)
    lone = ((effects != 0).sum(0) == 1).nonzero().flatten()
    shown = lone_rows(rows, BOX)
    assert len(lone)
    assert torch.isfinite(shown).all()
    for row in lone.tolist():
        example = inputs[int((effects[:, row] != 0).nonzero())]
        assert (shown - example).abs().amax(1).min() < 1e-12  # cdist itself is not that exact
    assert len(lone_rows(torch.zeros(4, 41).double(), BOX)) == 0


def test_outside_is_measured_in_parts_of_the_range():
    box = Valid(torch.tensor([-1.0, 0.0]).double(), torch.tensor([1.0, 4.0]).double())
    assert outside(torch.tensor([[0.0, 5.0]]).double(), box) == 0.25
    assert outside(torch.tensor([[-2.0, 5.0]]).double(), box, slack=0.5) == 0.25
    assert outside(torch.tensor([[0.5, 3.0]]).double(), box) == 0
    assert outside(torch.tensor([[torch.nan, 3.0]]).double(), box) == torch.inf


def test_a_place_of_a_category_is_0_or_1():
    ends = torch.zeros(2).double(), torch.ones(2).double()
    half = torch.tensor([[0.5, 0.05]]).double()
    assert outside(half, Valid(*ends)) == 0
    assert outside(half, Valid(*ends, torch.tensor([True, True]))) == pytest.approx(0.4)
    assert outside(half, Valid(*ends, torch.tensor([False, True]))) == 0


def test_rows_that_differ_in_one_active_example_show_it():
    """All effects have one profile, as under two classes: then differences of effects are sparser than these."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(6, 40, generator=generator).double()
    profile = torch.randn(200, generator=generator).double()
    active = torch.rand(6, 200, generator=generator) < 0.7
    sizes = torch.tensor([1.0, -0.8, 0.6, -0.5, 0.9, 0.7]).double()
    rows = (sizes[:, None] * profile * active).T @ torch.cat([inputs, torch.ones(6, 1).double()], 1)
    shown = lone_differences(rows, profile, BOX, generator)
    assert torch.cdist(inputs, shown).amin(1).max() < 1e-8


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_completed_from_trusted_entries_despite_decoys(seed, batch):
    """A third is missing, and of what is trusted every tenth entry is wrong."""
    _inputs, effects, rows = made(seed, batch, active=0.7)
    generator = torch.Generator().manual_seed(seed + 1)
    trust = (torch.rand(rows.shape, generator=generator) > 0.33).double()
    wrong = torch.rand(rows.shape, generator=generator) < 0.1
    seen = torch.where(wrong, torch.randn(rows.shape, generator=generator, dtype=torch.float64), rows)
    found, noise = trusted_rows(torch.where(trust > 0, seen, 1e6), trust, batch, 1e-12)
    live = (effects != 0).any(0)
    assert ((found - rows).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-30))[live].median() < 1e-6
    assert noise < 1e-6


def test_noise_that_is_left_is_told():
    _, _, rows = made(13, 2)
    noisy = rows + 1e-3 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    trust = torch.ones_like(rows)
    assert trusted_rows(noisy, trust, 2, 1e-12)[1] > 1e-3 * 0.5 / rows.square().mean().sqrt()


def test_nothing_trusted_gives_nothing():
    _, _, rows = made(15, 2)
    found, noise = trusted_rows(rows, torch.zeros_like(rows), 2, 1e-7)
    assert not found.any()
    assert noise == 1e-7


def test_noise_in_the_bias_shrinks_an_input_and_does_not_blow_it_up():
    """Rows of noise alone: the inputs stay in the order of magnitude of 1."""
    noise = torch.randn(96, 41, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noise[:, -1] *= 1e-9
    assert recovered(noise, 1)[1].inputs.abs().max() < 10
