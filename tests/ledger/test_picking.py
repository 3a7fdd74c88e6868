"""What no attacker can do under a guarantee: held against the best attacker there is."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import Exposure
from fedveil.ledger.picking import gaussian_bound, most_picked, pure_bound
from fedveil.ledger.statement import statement


def bound(spec: str, among: int = 100, **exposure: float) -> float | None:
    given = Exposure(**({"parameters": 100, "rounds": 3, "steps_per_round": 1, "sampling_rate": 1.0} | exposure))  # type: ignore[arg-type]
    return most_picked(statement(Chain.of(spec), given), given, among)


def test_dp_laplace_is_bounded_by_its_epsilon() -> None:
    assert bound("dp-laplace:epsilon=3") == pytest.approx(math.exp(3) / (math.exp(3) + 99))
    # Several local steps behind one update add up.
    assert bound("dp-laplace:epsilon=3", local_steps=2) == pytest.approx(math.exp(6) / (math.exp(6) + 99))


def test_gaussian_noise_is_bounded_by_its_distance() -> None:
    assert bound("dp-sgd:noise_multiplier=1,clip=1") == pytest.approx(float(ndtr(ndtri(0.01) + 2)))
    # Two updates lie at most twice the clip apart.
    assert bound("dp-clip:clip=1,sigma=4") == pytest.approx(float(ndtr(ndtri(0.01) + 0.5)))
    assert bound("dp-clip:clip=1,sigma=4", local_steps=4) == pytest.approx(float(ndtr(ndtri(0.01) + 1)))


@pytest.mark.parametrize(
    "spec", ["dp-laplace:epsilon=0.5", "dp-clip:clip=1,sigma=4", "dp-sgd:noise_multiplier=1,clip=1"]
)
def test_messages_about_one_batch_are_composed(spec: str) -> None:
    """As many local steps behind one update would be."""
    given = Exposure(parameters=100, rounds=3, steps_per_round=1, sampling_rate=0.1, example_rate=0.01)
    steps = dataclasses.replace(given, local_steps=9)
    found = most_picked(statement(Chain.of(spec), given), given, 100, views=9)
    assert found == pytest.approx(most_picked(statement(Chain.of(spec), steps), steps, 100))
    assert found > most_picked(statement(Chain.of(spec), given), given, 100)  # type: ignore[operator]


@pytest.mark.parametrize("spec", ["gradient-dropout", "duchi:epsilon=1", "cdp", "none"])
def test_no_bound_where_no_guarantee_covers_a_whole_update_against_the_server(spec: str) -> None:
    assert bound(spec) is None


def test_a_guarantee_that_does_not_hold_bounds_nothing() -> None:
    assert bound("dp-laplace:epsilon=3", bare_rounds=1) is None


def test_the_stronger_of_two_guarantees_counts() -> None:
    both = bound("dp-clip:clip=1,sigma=4+dp-clip:clip=1,sigma=8")
    assert both == pytest.approx(float(ndtr(ndtri(0.01) + 0.25)))


def test_the_best_attacker_stays_below_and_comes_near() -> None:
    """Candidates at the corners of a simplex, all at the greatest distance; the nearest one is the best guess."""
    random, among, distance = np.random.default_rng(0), 10, 2.0
    corners = np.eye(among) * distance / math.sqrt(2)
    seen = corners[0] + random.standard_normal((20_000, among))
    picked = np.square(seen[:, None] - corners).sum(-1).argmin(1) == 0
    assert 0.6 * gaussian_bound(distance, among) < picked.mean() < gaussian_bound(distance, among)
    # Randomized response reaches the pure bound.
    epsilon = 1.5
    truth = math.exp(epsilon) / (math.exp(epsilon) + among - 1)
    assert pure_bound(epsilon, among) == pytest.approx(truth)
