"""Two rows on the same images are compared image by image: what both owe to the image is no difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedveil.auditing.result import Estimate
from fedveil.leakage.intervals import bootstrap
from fedveil.study.outcome import Value
from fedveil.study.pairing import SEED, Sample, difference, order
from fedveil.study.summary import summary
from study.test_summary import outcome

IMAGES = np.random.Generator(np.random.Philox(3)).normal(20, 6, 24)  # some images are rebuilt far better than others


def sample(values: Any, images: str = "the same", per_seed: int = 24) -> Sample:
    clusters = [SEED * (i // per_seed) + i % per_seed for i in range(len(values))]
    return Sample(images=images, values=[float(value) for value in values], clusters=clusters)


def row(name: str, values: Any, published: str, **more: Any) -> Value:
    found = bootstrap(values)
    ours = Estimate(mean=found.mean, low=found.low, high=found.high, count=found.count)
    told = {"group": "", "column": "PSNR", "metric": "psnr", "better": "low"} | more
    return Value(row=name, ours=ours, published=published, sample=sample(values), **told)


def test_a_small_difference_on_every_image_is_found_although_the_intervals_overlap() -> None:
    shifted = IMAGES + 1 + np.tile([0.1, -0.1], 12)
    found = difference(sample(shifted), sample(IMAGES), share=False)
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    assert 0.9 < found.low < found.high < 1.1
    told = summary(outcome(row("a", IMAGES, "1"), row("b", shifted, "2"), row("c", shifted + 5, "3")))
    assert not any("within noise" in sentence for sentence in told)
    mixed = np.roll(shifted, 7)  # the same numbers, each beside another image
    told = summary(outcome(row("a", IMAGES, "1"), row("b", mixed, "2"), row("c", shifted + 9, "3")))
    assert any("a is within noise of b" in sentence for sentence in told)


def test_other_images_are_not_compared_in_pairs() -> None:
    assert difference(sample(IMAGES), sample(IMAGES, "others"), share=False) is None


def test_seeds_that_disagree_widen_the_difference() -> None:
    steady = np.concatenate([IMAGES, IMAGES])
    agree = difference(sample(steady + 1), sample(steady), share=False)
    apart = difference(sample(np.concatenate([IMAGES + 2, IMAGES])), sample(steady), share=False)
    assert agree is not None
    assert apart is not None
    assert agree.mean == pytest.approx(apart.mean)
    assert agree.low > 0 > apart.low


def test_the_order_is_drawn_over_images_that_all_rows_share() -> None:
    rows = [sample(IMAGES + k) for k in range(4)]
    means = [Estimate(mean=float(np.mean(each.values)), low=10, high=30, count=24) for each in rows]
    together = order([1.0, 2.0, 3.0, 4.0], means, rows)
    assert (together.low, together.mean, together.high) == (1.0, 1.0, 1.0)
    alone = order([1.0, 2.0, 3.0, 4.0], means, [None] * 4)
    assert alone.low < 0


def test_a_lead_that_an_informed_attacker_takes_away_is_named() -> None:
    own = row("a", IMAGES, "1")
    known = own.model_copy(
        update={"informed": Estimate(mean=30, low=28, high=32, count=24), "informed_sample": sample(IMAGES + 10)}
    )
    rival = row("b", IMAGES + 3, "2")
    told = summary(outcome(known, rival))
    assert any("its lead over b is gone" in sentence for sentence in told)
    told = summary(outcome(known, row("b", IMAGES + 20, "2")))
    assert not any("is gone" in sentence for sentence in told)
