"""`ClientBatch`: what a defense sees of a step."""

import copy

import pytest
import torch

from fedveil.clients.batch import ClientBatch
from fedveil.errors import FedveilError

from .plain import assert_trees_close, make_case, plain_gradients


def make_batch(name, backend="loop", **options):
    case = make_case(name, **options)
    params, buffers, inputs, targets, streams = case.arguments()
    return case, ClientBatch(case.engine(backend), params, buffers, inputs, targets, streams)


def test_share_is_the_gradient_with_moved_buffers_and_what_was_seen():
    case, batch = make_batch("batch norm")
    update, buffers, losses, _ = plain_gradients(case)
    shared = batch.share()
    assert_trees_close(shared.update, update)
    assert_trees_close(shared.buffers, buffers)
    torch.testing.assert_close(shared.loss, losses)
    assert shared.seen is batch.inputs


def test_nothing_but_share_moves_buffers_and_share_leaves_the_batchs_own():
    _, batch = make_batch("batch norm")
    before = copy.deepcopy(dict(batch.buffers))
    batch.gradient()
    batch.input_gradient()
    batch.loss()
    batch.features("1")
    first = batch.share()
    torch.testing.assert_close(dict(batch.buffers), before, rtol=0, atol=0)
    assert_trees_close(batch.share().buffers, first.buffers, 0)


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_other_inputs_and_other_weights(backend):
    case, batch = make_batch("mlp", backend)
    moved = case.inputs + 1
    shared = batch.share(moved)
    assert shared.seen is moved
    assert_trees_close(shared.update, plain_gradients(case, inputs=moved)[0])
    weights = case.params * 2.0
    found = batch.gradient(params=weights)
    case.params = weights
    assert_trees_close(found, plain_gradients(case)[0])


def test_every_pass_draws_its_dropout_masks_anew_and_a_repeat_repeats_them():
    runs = []
    for _ in range(2):
        _, batch = make_batch("dropout")
        runs.append([batch.loss(), batch.loss(), batch.share().loss])
    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][1], runs[0][2])


def test_places_of_a_chain_have_their_own_streams_and_state():
    _, batch = make_batch("dropout")
    states = [{}, {"memory": torch.ones(3)}]
    first, second = (batch.at(place, states[place]) for place in (0, 1))
    assert second.state is states[1]
    assert not torch.equal(first.streams.normal(4), second.streams.normal(4))
    assert torch.equal(batch.at(0, {}).streams.normal(4), batch.at(0, {}).streams.normal(4))
    # What a defense computed on the way does not change what the others draw.
    alone = make_batch("dropout")[1].share().loss
    first.loss()
    assert torch.equal(batch.share().loss, alone)


def test_the_leaf_to_perturb():
    case, batch = make_batch("named inputs")
    assert batch.perturbed is case.inputs["image"]
    other = batch.with_perturbed(case.inputs["image"] + 1)
    assert torch.equal(other["image"], case.inputs["image"] + 1)
    assert other["age"] is case.inputs["age"]
    assert batch.perturbed is case.inputs["image"]
    case.perturb = None
    batch.engine = case.engine("loop")
    with pytest.raises(FedveilError, match="name one of image, age"):
        _ = batch.perturbed


def test_count():
    assert make_batch("mlp", clients=5)[1].count == 5
