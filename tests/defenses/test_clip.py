"""Clipping bounds the norm and leaves the direction alone."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.defenses.clip import Clip
from fedveil.tree import Tree

SIZES = st.floats(1e-6, 1e6)
orders = pytest.mark.parametrize("order, power", [("l1", 1.0), ("l2", 2.0)])


def updates(seed, scales, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    clients = len(scales)
    tree = Tree(
        {
            "w": torch.randn(clients, 4, 3, generator=generator, dtype=dtype),
            "b": torch.randn(clients, 4, generator=generator, dtype=dtype),
        }
    )
    return tree * torch.tensor(scales, dtype=dtype)


def clip(update, **fields):
    return Clip(**fields).protect(update, None)


@orders
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), scales=st.lists(SIZES, min_size=1, max_size=4), norm=SIZES)
def test_norm_is_bounded_and_direction_unchanged(order, power, seed, scales, norm):
    update = updates(seed, scales)
    clipped = clip(update, norm=norm, order=order)
    before, after = update.norm(power), clipped.norm(power)
    assert (after <= norm * (1 + 1e-5)).all()
    torch.testing.assert_close(after, before.clamp_max(norm), rtol=1e-5, atol=0)
    cosine = clipped.dot(update) / (clipped.norm() * update.norm())
    torch.testing.assert_close(cosine, torch.ones(len(scales)), rtol=1e-5, atol=1e-5)


@orders
def test_clients_are_clipped_each_by_their_own_norm(order, power):
    update = updates(0, [0.01, 1.0, 100.0])
    clipped = clip(update, norm=0.5, order=order)
    assert torch.equal(clipped["w"][0], update["w"][0])  # small enough: untouched to the bit
    torch.testing.assert_close(clipped.norm(power)[1:], torch.tensor([0.5, 0.5]))


def test_the_norm_is_taken_over_all_tensors_together():
    update = Tree({"a": torch.full((1, 1), 3.0), "b": torch.full((1, 1), 4.0)})
    clipped = clip(update, norm=1.0)
    torch.testing.assert_close(clipped.flat(), torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(clip(update, norm=1.0, order="l1").flat(), torch.tensor([[3 / 7, 4 / 7]]))


@orders
def test_a_zero_update_stays_zero(order, power):
    zero = updates(0, [0.0, 1.0])
    clipped = clip(zero, norm=1e-3, order=order)
    assert clipped.isfinite().all()
    assert not clipped["w"][0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [1e30, 3e38])
def test_a_norm_beyond_the_range_of_the_type_clips_nothing(norm, dtype):
    update = updates(0, [1.0], dtype)
    assert torch.equal(clip(update, norm=norm)["w"], update["w"])


@orders
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    scales=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3),
    norm=st.one_of(st.floats(1e-7, 1e3), st.floats(1e-44, 1e-30)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_the_bound_holds_for_the_numbers_that_go_out(order, power, seed, scales, norm, dtype):
    update = updates(seed, scales, dtype)
    clipped = clip(update, norm=norm, order=order)
    for k in range(len(scales)):
        entries = clipped.flat()[k].tolist()  # exact, as fractions are
        if order == "l1":
            assert sum(map(Fraction, map(abs, entries))) <= Fraction(norm)
        else:
            assert sum(Fraction(entry) ** 2 for entry in entries) <= Fraction(norm) ** 2


@orders
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_holds_over_millions_of_entries(order, power, dtype):
    update = Tree({"w": torch.rand(1, 3_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)})
    clipped = clip(update, norm=1e3, order=order)
    length = torch.linalg.vector_norm(clipped["w"].double(), power)
    assert 0.9 * 1e3 < length <= 1e3


def test_clipping_twice_is_clipping_once():
    update = updates(0, [100.0, 3.0])
    once = clip(update, norm=1.0)
    assert torch.equal(clip(once, norm=1.0)["w"], once["w"])
