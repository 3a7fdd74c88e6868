"""Intervals against SciPy, closed forms, and their own coverage."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.errors import FedveilError
from fedveil.leakage.intervals import Interval, bootstrap, effective_count, expanded_tail, paired


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("count", [5, 30, 400])
def test_agrees_with_scipys_percentile_bootstrap(count: int, random: np.random.Generator) -> None:
    values = random.lognormal(size=count)
    ours = bootstrap(values, resamples=40_000)
    level = 1 - 2 * expanded_tail(0.95, count)
    theirs = stats.bootstrap(
        (values,), np.mean, method="percentile", confidence_level=level, n_resamples=40_000, batch=2000, rng=1
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.04 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.04 * width)
    assert ours.mean == pytest.approx(values.mean())
    assert ours.count == count


def test_expansion_makes_up_for_few_values() -> None:
    assert expanded_tail(0.95, 10**6) == pytest.approx(0.025, rel=1e-4)
    tails = [expanded_tail(0.95, count) for count in (2, 3, 5, 10, 100)]
    assert tails == sorted(tails)
    expected = stats.norm.cdf(-math.sqrt(5 / 4) * stats.t.ppf(0.975, df=4))
    assert expanded_tail(0.95, 5) == pytest.approx(expected)


def test_covers_the_mean_as_often_as_it_says(random: np.random.Generator) -> None:
    hits = 0
    for seed, values in enumerate(random.normal(size=(600, 10))):
        interval = bootstrap(values, seed=seed, resamples=800)
        hits += interval.low <= 0 <= interval.high
    assert 0.91 <= hits / 600 <= 0.98


def test_same_seed_same_interval(random: np.random.Generator) -> None:
    values = random.normal(size=50)
    assert bootstrap(values, seed=7) == bootstrap(torch.from_numpy(values), seed=7) == bootstrap(list(values), seed=7)
    assert bootstrap(values, seed=7) != bootstrap(values, seed=8)


def test_groups_are_resampled_whole(random: np.random.Generator) -> None:
    groups = np.repeat(np.arange(12), 20)
    level_of_group = random.normal(size=12)
    values = np.repeat(level_of_group, 20)
    # Twenty copies of a value say no more than one.
    grouped, few, naive = bootstrap(values, groups=groups), bootstrap(level_of_group), bootstrap(values)
    assert (grouped.low, grouped.high) == pytest.approx((few.low, few.high))
    assert grouped.high - grouped.low > 3 * (naive.high - naive.low)
    assert bootstrap(values, groups=[f"batch {group:02}" for group in groups]) == grouped


def test_groups_of_unequal_size_keep_the_mean_over_images() -> None:
    interval = bootstrap([0.0, 0.0, 0.0, 4.0], groups=[0, 0, 0, 1])
    assert (interval.mean, interval.low, interval.high, interval.count) == (1, 0, 4, 4)


def test_groups_of_one_image_change_nothing(random: np.random.Generator) -> None:
    values = random.normal(size=20)
    assert bootstrap(values, groups=np.arange(20)) == bootstrap(values)
    assert bootstrap(values > 0, groups=np.arange(20)) == bootstrap(values > 0)


def test_a_single_group_falls_back_to_its_values(random: np.random.Generator) -> None:
    values = random.normal(size=20)
    assert bootstrap(values, groups=[3] * 20) == bootstrap(values)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 200), hits=st.data(), level=st.sampled_from([0.8, 0.95, 0.99]))
def test_shares_get_the_wilson_interval(count: int, hits: st.DataObject, level: float) -> None:
    k = hits.draw(st.integers(0, count))
    interval = bootstrap(np.arange(count) < k, level=level)
    expected = stats.binomtest(k, count).proportion_ci(level, method="wilson")
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert interval.mean == pytest.approx(k / count)


def test_what_counts_as_a_share() -> None:
    zeros = [0.0] * 8
    assert bootstrap(zeros) == Interval(mean=0, low=0, high=0, count=8)  # measured: an error of exactly 0, say
    assert bootstrap(zeros, share=True) == bootstrap([False] * 8) == bootstrap(torch.zeros(8, dtype=torch.bool))
    assert bootstrap(zeros, share=True).high > 0.3
    with pytest.raises(FedveilError, match="zeros and ones"):
        bootstrap([0.5, 1], share=True)


@pytest.mark.parametrize("dependence", [0.0, 0.3, 1.0])
def test_grouped_shares_cover_whatever_the_dependence(dependence: float, random: np.random.Generator) -> None:
    truth, size, hits = 0.3, 8, 0
    groups = np.repeat(np.arange(24), size)
    for _ in range(500):
        if dependence == 0:
            chances = np.full(24, truth)
        elif dependence == 1:
            chances = (random.random(24) < truth).astype(float)
        else:
            scale = (1 - dependence) / dependence
            chances = random.beta(truth * scale, (1 - truth) * scale, size=24)
        interval = bootstrap(random.random(24 * size) < np.repeat(chances, size), groups=groups)
        hits += interval.low <= truth <= interval.high
    assert hits / 500 >= 0.92


@settings(max_examples=60, deadline=None)
@given(groups=st.integers(1, 40), size=st.integers(1, 12), seed=st.integers(0, 9999), chance=st.floats(0, 1))
def test_effective_count_lies_between_groups_and_images(groups: int, size: int, seed: int, chance: float) -> None:
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(groups), size)
    worth = effective_count(random.random(groups * size) < chance, labels)
    assert groups - 1e-9 <= worth <= groups * size + 1e-9
    assert effective_count(np.repeat(random.random(groups) < chance, size), labels) <= groups * 1.35 + 1e-9


def test_many_independent_groups_are_worth_nearly_all_their_images(random: np.random.Generator) -> None:
    assert effective_count(random.random(4000) < 0.5, np.repeat(np.arange(500), 8)) > 3200


def test_paired_is_the_bootstrap_of_the_differences(random: np.random.Generator) -> None:
    a = random.normal(size=40)
    b = a - 0.1 + 0.01 * random.normal(size=40)
    assert paired(a, b, seed=2) == bootstrap(a - b, seed=2)
    # Images differ far more than the two methods do: only the paired interval sees it.
    assert paired(a, b).low > 0
    assert bootstrap(a).low < bootstrap(b).high
    groups = np.repeat(np.arange(8), 5)
    assert paired(a, b, groups=groups) == bootstrap(a - b, groups=groups)


def test_paired_shares() -> None:
    never = np.zeros(30, dtype=bool)
    same = paired(never, never)
    assert same.mean == 0
    assert -0.1 < same.low < -0.03
    assert same.high == -same.low
    # Agresti and Min's formula by hand: 100 images, 15 gained, 5 lost.
    a = np.array([True] * 15 + [False] * 5 + [True] * 80)
    b = np.array([False] * 15 + [True] * 5 + [True] * 80)
    center, spread = (15.5 - 5.5) / 102, math.sqrt(15.5 + 5.5 - 10**2 / 102) / 102
    interval = paired(a, b)
    assert interval.low == pytest.approx(center - 1.959964 * spread)
    assert interval.high == pytest.approx(center + 1.959964 * spread)
    assert interval.mean == pytest.approx(0.1)
    swapped = paired(b, a)
    assert (swapped.low, swapped.high) == pytest.approx((-interval.high, -interval.low))
    assert paired(a.astype(float), b.astype(float), share=True) == interval


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.booleans())
def test_the_mean_lies_inside(values: list[float], grouped: bool) -> None:
    groups = [index // 3 for index in range(len(values))] if grouped else None
    for interval in (
        bootstrap(values, groups=groups, resamples=200),
        bootstrap(np.array(values) > 0, groups=groups),
        paired(np.array(values) > 0, np.array(values) > -1e9, groups=groups),
    ):
        assert interval.low <= interval.mean <= interval.high


def test_bad_input_is_refused() -> None:
    with pytest.raises(FedveilError, match="2 of 3 values are not finite"):
        bootstrap([math.nan, 1, math.inf])
    with pytest.raises(FedveilError, match="at least one value"):
        bootstrap([])
    with pytest.raises(FedveilError, match="one group per value"):
        bootstrap([1, 2], groups=[1])
    with pytest.raises(FedveilError, match=r"for example 0\.95"):
        bootstrap([1, 2], level=95)
    with pytest.raises(FedveilError, match="same images"):
        paired([1, 2], [1])
