"""The order of local steps: found where it can be, and worth finding."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.attacks import matcher
from fedveil.attacks.latent import Latents
from fedveil.attacks.optimizers import LBFGS, Adam
from fedveil.attacks.ordering import arranged, found_orders, searched, with_search
from fedveil.attacks.polish import polishing
from fedveil.attacks.priors import TotalVariation
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.attacks.scene import LocalSteps, Workbench
from fedveil.leakage.assignment import assign
from fedveil.leakage.metrics import psnr
from fedveil.streams import Streams
from fedveil.tree import Tree

from .small import SMOOTH, Choices, digits, match, matcher_of, task_of
from .test_unrolled import even, orders, trained


def shuffled(victims, local, model=SMOOTH, seed=0):
    """Victims who shuffled their digits every epoch; the attacker has the labels, sorted."""
    inputs, targets, problem = digits(model, victims=victims, batch=local.examples)
    module, walks = task_of(model).model, [orders(local, seed + v) for v in range(victims)]
    made = [trained(module, x, y, local, walk) for x, y, walk in zip(inputs, targets, walks, strict=True)]
    problem = replace(problem, target=Tree.stack(made), local=local, labels=targets.sort(1).values)
    return inputs, targets, walks, problem


def batches(order, local):
    """What matters of an order: which examples each step takes."""
    return [sorted(batch.tolist()) for batch in order.reshape(-1).split(local.batch_sizes)]


def decibels_of(found, inputs):
    return psnr(assign(found.inputs, inputs)[0].flatten(0, 1), inputs.flatten(0, 1), task_of(SMOOTH).normalization.std)


CASES = {
    "one epoch": even([2, 2], 1.0),
    "a smaller last batch": even([2, 1], 1.0, 2),
    "momentum": even([2, 2], 0.5, 2, momentum=0.9),
    "more orders than are drawn": even([2, 2, 2], 0.5, 2),  # 8100
    "a rate for each step": LocalSteps((1.0, 0.5, 0.5, 0.25), (2, 2, 2, 2), 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stacked", [True, False])
def test_the_true_inputs_give_the_true_order(case, stacked):
    local = CASES[case]
    inputs, targets, walks, problem = shuffled(3, local)
    made = matcher_of(problem, Choices(steps=1), "stacked" if stacked else "loop")
    update = made._update if stacked else made._plain_update
    found = found_orders(problem, inputs, targets, update, stacked=stacked)
    assert [batches(order, local) for order in found] == [batches(walk, local) for walk in walks]


@given(st.integers(0, 10**6), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 3))
def test_whatever_the_cost_every_epoch_stays_a_permutation(seed, sizes, epochs):
    local, streams = even(sizes, 0.1, epochs), Streams.seeded(seed, [0])
    values = streams.fold("cost").uniform(local.examples, epochs, local.examples)[0]

    def cost(tried):
        """Of a place for each example: the best order is an assignment."""
        places = torch.arange(local.examples)
        return torch.stack([values[order, torch.arange(epochs)[:, None], places].sum() for order in tried]).double()

    found = searched(cost, local, streams)
    assert torch.equal(found.sort(1).values, torch.arange(local.examples).expand(epochs, -1))
    again = searched(cost, local, streams, found)
    assert cost(again[None]) <= cost(found[None])


def test_a_cost_that_is_nowhere_finite_ends_the_search():
    local = even([1, 1], 0.1)
    found = searched(lambda tried: torch.full((len(tried),), torch.inf).double(), local, Streams.seeded(0, [0]))
    assert sorted(found[0].tolist()) == [0, 1]


def test_a_recipe_keeps_its_steps_and_searches_between_them():
    phases = Phase(10, Adam()), polishing(6), Phase(4, LBFGS(), reweighs=True), Phase(1, Adam())
    recipe = Recipe(tries=(phases, phases))
    split = with_search(recipe, even([2, 2], 0.1))
    assert split.steps == recipe.steps
    steps = [(phase.steps, phase.reorders) for phase in split.tries[1]]
    assert steps == [(3, False), *[(n, True) for n in (3, 2, 2, 2, 2, 1, 1, 4, 1)]]
    from_latents = with_search(Recipe(tries=((Phase(5, Adam(), candidate=Latents()), *phases),)), even([2, 2], 0.1))
    assert all(phase.reorders for phase in from_latents.tries[0]), "its first pictures are likely ones"
    kept = [even([4], 0.1, 3), even([2, 2], 0.1, order="same"), even([2, 2], 0.1, order="mean"), None]
    assert all(with_search(recipe, each) is recipe for each in kept)


def test_examples_are_arranged_by_victim():
    values = torch.arange(6).reshape(2, 3)
    assert arranged(values, torch.tensor([[2, 0, 1], [0, 2, 1]])).tolist() == [[2, 0, 1], [3, 5, 4]]


def polished(problem):
    recipe = Recipe(priors=(TotalVariation(1e-5),), tries=((Phase(100, Adam()), polishing(10)),))
    return matcher.match(problem, recipe, Workbench(backend="stacked"))


def test_searching_the_order_beats_supposing_one():
    """Shuffled digits, two epochs of two steps at a largish rate: neither supposition explains the update."""
    local = even([2, 2], 1.0, 2)
    inputs, targets, _, problem = shuffled(3, local)
    found = polished(problem)
    reached = {"searched": decibels_of(found, inputs).mean()}
    for order in ("same", "mean"):
        other = polished(replace(problem, local=replace(local, order=order)))
        reached[order] = decibels_of(other, inputs).mean()
        assert float(found.cost.mean()) < float(other.cost.mean()) / 2, order
    said = ", ".join(f"{order} {value:.1f} dB" for order, value in reached.items())
    assert reached["searched"] > max(reached["same"], reached["mean"]) + 20, said
    assert torch.equal(found.labels.sort(1).values, targets.sort(1).values)


def test_what_is_handed_in_is_one_thing_however_victims_are_chunked():
    local = even([2, 1], 1.0, 2)
    _, _, _, problem = shuffled(3, local)
    together, apart = (match(problem, Choices(steps=8, signed=False), backend="stacked", chunk=n) for n in (3, 1))
    torch.testing.assert_close(together.inputs, apart.inputs, rtol=1e-3, atol=1e-3)
    assert torch.equal(together.labels, apart.labels)
    torch.testing.assert_close(together.iterates[-1], together.inputs, rtol=0, atol=0)


def test_labels_stand_beside_their_inputs():
    """Inputs are handed in as they stand in the first epoch: walked through like that they explain the update."""
    local = even([2, 2], 1.0)
    _, _, _, problem = shuffled(3, local)
    found = polished(problem)
    module = task_of(SMOOTH).model
    for v in range(3):
        made = trained(module, found.inputs[v], found.labels[v], local)
        error = sum(float((made[n] - problem.target[n][v]).square().sum()) for n in made)
        total = sum(float(problem.target[n][v].square().sum()) for n in made)
        assert error / total == pytest.approx(float(found.cost[v]), rel=0.05, abs=1e-6)
