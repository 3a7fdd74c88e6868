"""The error of a batch does not depend on the order of its pictures."""

from itertools import permutations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.attacks.matched import assigned, matched_error


def batches(seed, size=3, count=4):
    source = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, size, 5, generator=source) for _ in range(2))


@given(st.integers(0, 10_000), st.permutations(range(4)))
def test_the_error_is_the_same_in_any_order(seed, order):
    made, wanted = batches(seed, size=4)
    expected = matched_error(made, wanted)
    assert torch.allclose(matched_error(made, wanted[:, order]), expected)
    assert torch.allclose(matched_error(made[:, order], wanted), expected)


def test_the_error_is_the_least_over_all_assignments():
    made, wanted = batches(1)
    each = [(made - wanted[:, order]).square().mean((1, 2)) for order in permutations(range(3))]
    assert torch.allclose(matched_error(made, wanted), torch.stack(each).amin(0))


def test_pictures_of_one_label_are_matched():
    made, wanted = batches(2)
    left, right = torch.tensor([[0, 0, 1]] * 4), torch.tensor([[1, 0, 0]] * 4)
    order = assigned(made, wanted, (left, right))
    assert torch.equal(right.gather(1, order), left)
    allowed = [order for order in permutations(range(3)) if order[2] == 0]
    each = [(made - wanted[:, order]).square().mean((1, 2)) for order in allowed]
    assert torch.allclose(matched_error(made, wanted, (left, right)), torch.stack(each).amin(0))


def test_slopes_pass_through_the_error_and_not_through_the_assignment():
    made, wanted = batches(3)
    made.requires_grad_()
    matched_error(made, wanted).sum().backward()
    partners = wanted.gather(1, assigned(made.detach(), wanted)[..., None].expand_as(wanted))
    assert torch.allclose(made.grad, 2 * (made.detach() - partners) / 15)


def test_a_batch_of_numbers_that_are_not_finite_is_matched_anyhow():
    made, wanted = batches(4)
    made[0, 1] = torch.nan
    assert sorted(assigned(made, wanted)[0].tolist()) == [0, 1, 2]
