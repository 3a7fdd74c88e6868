"""What several searches agree on: the order of their pictures, how they are registered, and their mean."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.attacks.consensus import HELPS, consensus, proposed_shift, registered, same_order, shifted

from .small import task_of


def pictures(count, size=16, channels=1, seed=0):
    """Smooth random pictures whose borders are flat, so that a small shift loses nothing."""
    drawn = torch.randn(count, channels, 4, 4, generator=torch.Generator().manual_seed(seed))
    inside = torch.nn.functional.interpolate(drawn, size=size - 8, mode="bilinear", align_corners=True)
    return torch.nn.functional.pad(inside, (4, 4, 4, 4))


def noise(shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- registration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("by", [(0, 1), (-2, 1), (2, 2), (0, 0), (-1, -2)])
def test_a_known_shift_is_found_and_undone(by, channels):
    aim = pictures(5, channels=channels)
    moved = shifted(aim, torch.tensor([by] * 5))
    assert proposed_shift(moved, aim).tolist() == [[-by[0], -by[1]]] * 5
    torch.testing.assert_close(registered(moved, aim), aim)
    noisy = moved + 0.1 * noise(moved.shape)
    assert (registered(noisy, aim) - aim).square().mean() < 0.02


def test_a_shift_goes_down_and_to_the_right_and_repeats_the_border():
    picture = torch.arange(9.0).reshape(1, 1, 3, 3)
    assert shifted(picture, torch.tensor([[1, 0]]))[0, 0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert shifted(picture, torch.tensor([[0, -1]]))[0, 0].tolist() == [[1, 2, 2], [4, 5, 5], [7, 8, 8]]


def test_aligned_pictures_are_left_alone_and_others_moved_only_where_it_helps():
    aim = pictures(6)
    for own in (aim, aim + 0.3 * noise(aim.shape), 2 * aim + 1):
        assert torch.equal(registered(own, aim), own)
    others = pictures(60, seed=1)
    aims = pictures(60, seed=2)
    moved = registered(others, aims)
    before, after = ((each - aims).square().flatten(1).sum(1) for each in (others, moved))
    kept = (moved == others).flatten(1).all(1)
    assert 0 < kept.sum() < 60
    assert (after[~kept] < HELPS * before[~kept]).all()


def test_a_picture_is_moved_by_a_few_pixels_only():
    aim = pictures(3)
    far = shifted(aim, torch.tensor([[5, 0]] * 3))
    assert proposed_shift(far, aim).abs().max() <= 2


def test_what_is_no_picture_or_a_tiny_one_stays_as_it_is():
    for shape in ((4, 6), (4, 1, 5, 5), (4, 3, 2, 9)):
        assert torch.equal(registered(noise(shape), noise(shape, 2)), noise(shape))


# ---- order ----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_within_labels_is_found(data):
    batch = data.draw(st.integers(1, 6))
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=batch, max_size=batch)))
    shuffled = torch.arange(batch)
    for label in labels.unique():
        places = (labels == label).nonzero().flatten()
        shuffled[places] = places[torch.tensor(data.draw(st.permutations(range(len(places)))))]
    aim = pictures(batch)
    held = torch.stack([aim, aim[shuffled] + 0.05 * noise(aim.shape)])
    order = same_order(held[None], aim[None], labels[None])[0]
    assert order[0].tolist() == list(range(batch))
    torch.testing.assert_close(held[1][order[1]], aim, atol=0.5, rtol=0)
    assert torch.equal(labels[order[1]], labels)


def test_pictures_of_unlike_labels_are_not_exchanged_and_without_labels_any_are():
    aim = pictures(2)
    held = aim.flip(0)[None, None]
    assert same_order(held, aim[None], torch.tensor([[0, 1]])).flatten().tolist() == [0, 1]
    assert same_order(held, aim[None], torch.tensor([[3, 3]])).flatten().tolist() == [1, 0]
    assert same_order(held, aim[None], None).flatten().tolist() == [1, 0]
    three = pictures(3)
    turned = three[[1, 2, 0]][None, None]  # to put it right, the first would have to take another label's place
    assert same_order(turned, three[None], torch.tensor([[0, 1, 1]]))[0, 0, 0] == 0
    assert same_order(turned, three[None], torch.tensor([[1, 1, 1]])).flatten().tolist() == [2, 0, 1]


# ---- the mean ---------------------------------------------------------------------------------------------------


def test_searches_that_hold_the_same_in_other_orders_and_places_agree_on_it():
    truth = task_of("lenet", "digits").test.batch(range(4))[0]
    truth = torch.nn.functional.interpolate(truth, size=16) + 1  # above zero, with a flat border
    truth = torch.nn.functional.pad(truth, (4, 4, 4, 4), value=truth.min().item())
    orders = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0], [3, 1, 2, 0], [2, 3, 0, 1]])
    held = torch.stack([truth[order] for order in orders])
    held[2] = shifted(held[2], torch.tensor([[1, -2]] * 4))
    everyone = torch.ones(1, 4, dtype=torch.bool)
    found = consensus(held[None], torch.tensor([0]), torch.full((1, 4), 7), everyone)
    torch.testing.assert_close(found.mean[0], truth)
    assert found.order[0].tolist() == orders.argsort(1).tolist()
    torch.testing.assert_close(found.in_order(held[None])[0, 1], truth)
    torch.testing.assert_close(found.for_each()[0, 1], held[1])  # what a search is drawn to is in its own order
    assert (held.mean(0) - truth).square().mean() > 0.1  # the plain mean is a blur


def test_a_search_that_broke_is_left_out_unless_all_did():
    held = torch.stack([pictures(1), pictures(1), 100 + pictures(1)])[None]
    counted = torch.tensor([[True, True, False]])
    torch.testing.assert_close(consensus(held, torch.tensor([0]), None, counted).mean[0], pictures(1))
    assert consensus(held, torch.tensor([0]), None, ~counted.any(1, keepdim=True).expand(1, 3)).mean.max() > 30
