"""Intervals over examples and seeds."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.auditing.result import Estimate
from fedveil.auditing.scoring import estimate
from fedveil.leakage.intervals import bootstrap
from fedveil.study.seeds import over_seeds, pooled


def run(values: list[float], *, share: bool = True) -> tuple[Estimate, list[float]]:
    return estimate(bootstrap(values, share=share)), values


def test_one_run_is_left_as_it_is() -> None:
    one = run([1.0, 0.0, 1.0])
    assert over_seeds([one], share=True) == one[0]


def test_more_runs_of_other_examples_narrow_the_interval() -> None:
    one, other = run([1.0] * 8 + [0.0] * 8), run([0.0] * 8 + [1.0] * 8)
    both = over_seeds([one, other], share=True)
    assert both.mean == 0.5
    assert both.count == 32
    assert both.high - both.low < one[0].high - one[0].low


def test_runs_that_disagree_widen_it() -> None:
    agree = over_seeds([run([1.0] * 8 + [0.0] * 8)] * 3, share=True)
    apart = over_seeds([run([1.0] * 16), run([0.0] * 16), run([1.0] * 8 + [0.0] * 8)], share=True)
    assert apart.mean == agree.mean
    assert apart.high - apart.low > agree.high - agree.low
    assert 0 <= apart.low < apart.high <= 1


def test_the_same_examples_do_not_average_out() -> None:
    same = Estimate(mean=0.8, low=0.7, high=0.9, count=100)
    assert pooled([same, same]).low == pytest.approx(0.7)
    assert pooled([same]) == same


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        centers = 0.5 + 0.15 * random.standard_normal(4)
        runs = [run([float(x) for x in random.random(20) < center]) for center in centers]
        found = over_seeds(runs, share=True)
        hits += found.low <= 0.5 <= found.high
    assert hits / 200 > 0.9
