"""Victims whose cost has settled rest, each by itself, and what becomes of one does not depend on the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.matcher import Matcher, match
from fedveil.attacks.optimizers import LBFGS, Adam, Descent
from fedveil.attacks.polish import polishing
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.attacks.rest import STILL, Rest, RestOverSteps
from fedveil.attacks.scene import Workbench
from fedveil.streams import Streams

from .small import SMOOTH, decibels, digits, on_the_way, task_of

STACKED = Workbench(backend="stacked")


# ---- the rule -----------------------------------------------------------------------------------------------


def rests_after(costs, patience):
    """The step before which a victim with these costs comes to rest; None if it never does."""
    rest = Rest(patience)
    for step, cost in enumerate(costs):
        if bool(rest.see(torch.tensor([cost]))):
            return step
    return None


def test_an_objective_that_stays_as_it_is_comes_to_rest():
    assert rests_after([1.0] * 10, 4) == 3
    assert rests_after([1.0, 0.5, *[0.5] * 9], 4) == 5
    assert rests_after([1.0] * 100, None) is None


def test_one_that_goes_up_and_down_has_not_settled():
    assert rests_after([1.0, 1.2] * 50, 4) is None
    assert rests_after([1.0, 1 + STILL / 2] * 50, 4) is not None


def test_small_steps_add_up():
    assert rests_after([(1 - STILL / 3) ** step for step in range(200)], 5) is None
    assert rests_after([(1 - STILL / 9) ** step for step in range(200)], 5) is not None


@given(some.lists(some.floats(1e-6, 10), min_size=1, max_size=40), some.integers(1, 6))
def test_rest_is_for_good_until_it_is_ended_and_depends_on_ones_own_objective(values, patience):
    alone, beside = Rest(patience), Rest(patience)
    before = False
    for step, value in enumerate(values):
        own, stacked = alone.see(torch.tensor([value])), beside.see(torch.tensor([2.0 - step / 100, value]))
        assert bool(own) == bool(stacked[1])
        assert bool(own) or not before
        before = bool(own)
    assert alone.all == before
    alone.wake()
    assert not alone.all


@given(some.lists(some.lists(some.floats(1e-6, 10), min_size=1, max_size=5), min_size=1, max_size=8))
def test_over_whole_steps_it_does_not_count_how_often_an_objective_was_seen(steps):
    once, often = (RestOverSteps(2, torch.zeros(1)) for _ in range(2))
    for values in steps:
        for value in values:
            once.see(torch.tensor([value]))
            often.see(torch.tensor([value]))
        often.see(torch.tensor([values[-1]]))  # as while others go on
        for each in (once, often):
            each.end_step()
        assert once.all == often.all
    for _ in range(2):
        once.see(torch.tensor([1.0]))
        once.end_step()
    assert once.all


# ---- optimizers ---------------------------------------------------------------------------------------------


def descend(optimizer, starts, steps=60, curvature=1.0):
    """Bowls of their own for every victim; (what was found, evaluations, costs told, points told)."""
    calls, costs, points, last = [], [], [], torch.empty(0)

    def evaluate(at):
        nonlocal last
        x = at["inputs"]
        calls.append(len(x))
        last = (curvature * x.square()).sum(1) + 1  # never zero: it settles at 1
        return {"inputs": 2 * curvature * x}, last

    descent = Descent(
        evaluate,
        lambda at: None,
        lambda c: costs.append(c.clone()),
        lambda at: points.append({name: tensor.clone() for name, tensor in at.items()}),
        total=lambda: last,
    )
    found = optimizer.minimize({"inputs": torch.tensor(starts)}, steps, descent)
    return found["inputs"], len(calls), torch.stack(costs), torch.stack([each["inputs"] for each in points])


SLOW, QUICK_ONE = [3.0, -2.0], [0.01, 0.01]
PATIENT = [Adam(0.05, signed=False, patience=4), Adam(0.05, patience=4), LBFGS(lr=0.2, patience=2)]


@pytest.mark.parametrize("optimizer", PATIENT, ids=repr)
def test_a_victim_that_rests_does_not_notice_the_others(optimizer):
    with_quick, _, costs, points = descend(optimizer, [SLOW, QUICK_ONE])
    with_slow, _, others, other_points = descend(optimizer, [SLOW, SLOW])
    quick_alone, _, _, _ = descend(optimizer, [QUICK_ONE, QUICK_ONE])
    assert torch.equal(with_quick[0], with_slow[0])
    assert torch.equal(with_quick[1], quick_alone[1])
    assert torch.equal(costs[:, 0], others[:, 0])
    assert torch.equal(points[:, 0], other_points[:, 0])


@pytest.mark.parametrize("optimizer", PATIENT, ids=repr)
def test_steps_that_nobody_makes_cost_nothing_and_are_told_all_the_same(optimizer):
    found, calls, costs, points = descend(optimizer, [QUICK_ONE, QUICK_ONE])
    _, whole, _, _ = descend(replace(optimizer, patience=None), [QUICK_ONE, QUICK_ONE])
    assert calls < whole / 2
    assert len(costs) == len(points) == 60
    assert torch.equal(points[-1], found)
    # A cost belongs to the point that the step started from.
    settled = (points[-1].square().sum(1) + 1).expand(2)
    torch.testing.assert_close(costs[-1], settled)


def test_those_who_rest_move_again_when_the_rate_falls():
    optimizer = Adam(0.5, patience=4)  # jumps to and fro around the minimum at every rate
    _, calls, _, points = descend(optimizer, [[0.3, 0.3]], steps=80)
    moved = (points[1:] != points[:-1]).flatten(1).any(1).nonzero().flatten() + 1
    assert calls < 80
    for mark, end in ((30, 50), (50, 70), (70, 80)):
        inside = moved[(moved >= mark) & (moved < end)]
        assert len(inside), mark
        assert inside[0] == mark


def test_without_patience_all_steps_are_made():
    for optimizer in (Adam(), LBFGS()):
        assert optimizer.patience is None
    _, calls, _, _ = descend(Adam(0.05), [QUICK_ONE])
    assert calls == 60


# ---- attacks ------------------------------------------------------------------------------------------------


def phases(patience, steps=160, polish=8):
    adam = Adam(signed=True, patience=patience)
    last = replace(polishing(polish), optimizer=LBFGS(patience=None if patience is None else 2), accepts=None)
    return Recipe(tries=((Phase(steps, adam), last),))


def test_a_victim_in_a_chunk_with_others_is_found_bit_for_bit():
    _, _, problem = digits(SMOOTH, victims=4)
    recipe, by_two = phases(10, steps=80, polish=4), Workbench(backend="stacked", chunk=2)
    first = match(problem.rows([0, 1]), recipe, by_two)
    other = match(problem.rows([0, 3]), recipe, by_two)
    assert torch.equal(first.inputs[0], other.inputs[0])
    assert torch.equal(on_the_way(first)[:, 0], on_the_way(other)[:, 0])
    assert torch.equal(first.costs[0], other.costs[0])
    assert torch.equal(match(problem, recipe, by_two).inputs[0], first.inputs[0])


def test_settling_loses_nothing_and_saves_evaluations(monkeypatch):
    images, _, problem = digits("lenet", victims=2)
    draw = Streams.seeded(3, range(2))
    noisy = replace(problem, target=problem.target.map(lambda tensor: tensor + 0.01 * draw.normal_like(tensor)))
    made = []
    whole = Matcher._evaluate

    def counting(self, *given, **named):
        made.append(1)
        return whole(self, *given, **named)

    monkeypatch.setattr(Matcher, "_evaluate", counting)
    counts, found = [], []
    for patience in (None, 20):
        made.clear()
        found.append(match(noisy, phases(patience, steps=240, polish=5), STACKED))
        counts.append(len(made))
    assert counts[1] < 0.9 * counts[0], counts
    quality = [decibels(each, images, task_of("lenet").normalization.std).mean().item() for each in found]
    assert quality[1] > quality[0] - 0.5, quality


@pytest.mark.parametrize("patience", [None, 5])
def test_progress_reaches_the_end_and_what_is_noted_has_one_length(patience):
    _, _, problem = digits(SMOOTH, victims=3)
    told = []
    bench = Workbench(backend="stacked", chunk=2, report=lambda done, total: told.append((done, total)))
    recipe = phases(patience, steps=60, polish=3)
    found = match(problem, recipe, bench)
    assert told[-1] == (2 * 63, 2 * 63)
    assert found.costs.shape[1] == len(found.iterates) == len(found.steps)
    assert torch.equal(found.iterates[-1], found.inputs)
    assert found.steps[-1] == 63


def test_published_presets_make_all_their_steps():
    for preset in (InvertingGradients.fedem(), InvertingGradients.fedbarre(), InvertingGradients.gradient_dropout()):
        assert [phase.optimizer.patience for phases in preset.recipe().tries for phase in phases] == [None]
    ours = InvertingGradients()
    assert all(phase.optimizer.patience for phases in ours.recipe().tries for phase in phases)
    assert all(phase.optimizer.patience for each in ours.under_noise() for phases in each.tries for phase in phases)
    still = replace(ours, settle=False).recipe().tries
    assert [phases[0].optimizer.patience for phases in still] == [None, None]


def test_what_settles_is_the_objective_with_its_priors():
    """Under a strong prior the match stops falling long before the picture is smooth."""
    told = []

    def evaluate(at):
        x = at["inputs"]
        return {"inputs": torch.ones_like(x)}, torch.ones(len(x))

    def total():
        told.append(1)
        return torch.tensor([2.0 ** -len(told)])

    descent = Descent(evaluate, lambda at: None, lambda c: None, lambda at: None, total=total)
    Adam(patience=3).minimize({"inputs": torch.zeros(1, 2)}, 20, descent)
    assert len(told) == 20
