"""Sentences from numbers: they change when the numbers do."""

from __future__ import annotations

from typing import Any

import pytest

from fedveil.auditing.result import Estimate
from fedveil.study.outcome import Outcome, Value
from fedveil.study.summary import order, summary


def near(mean: float, half: float = 0.1) -> Estimate:
    return Estimate(mean=mean, low=mean - half, high=mean + half, count=8)


def value(row: str, ours: float, published: str, half: float = 0.1, **more: Any) -> Value:
    given: dict[str, Any] = {"group": "", "column": "PSNR", "metric": "psnr", "better": "low", **more}
    return Value(row=row, ours=near(ours, half), published=published, **given)


def outcome(*values: Value, own: str = "a") -> Outcome:
    rows = [each.row for each in values]
    told: dict[str, Any] = {"title": "T", "paper": "P", "scale": "desk", "cuts": [], "notes": [], "seeds": [0]}
    return Outcome(**told, heads=["PSNR"], rows=rows, own=[own], values=list(values))


SAME = [value("a", 1.0, "10"), value("b", 2.0, "20"), value("c", 3.0, "30"), value("d", 4.0, "40")]


def test_the_published_order_holds_is_reversed_or_undecided() -> None:
    assert "the published order holds (Kendall's τ 1.00" in summary(outcome(*SAME))[0]
    turned = [each.model_copy(update={"published": str(-float(each.published))}) for each in SAME]
    assert "the order is reversed (Kendall's τ -1.00" in summary(outcome(*turned))[0]
    swapped = ["10", "20", "40", "30"]
    partly = [each.model_copy(update={"published": printed}) for each, printed in zip(SAME, swapped, strict=True)]
    assert "the published order holds in part (Kendall's τ 0.67" in summary(outcome(*partly))[0]
    noisy = [each.model_copy(update={"ours": near(each.ours.mean, 20.0)}) for each in SAME if each.ours]
    told = summary(outcome(*noisy))
    assert "undecided" in told[0]
    assert "a is within noise of all others." in told[1]


def test_one_run_without_spread_decides_nothing() -> None:
    alone = [each.model_copy(update={"ours": Estimate(mean=m, low=m, high=m, count=1)}) for m, each in enumerate(SAME)]
    (told,) = summary(outcome(*alone))
    assert "how much is noise is not known from one run" in told


def test_rows_of_different_metrics_have_no_common_order() -> None:
    mixed = [*SAME[:2], *(each.model_copy(update={"metric": "ssim"}) for each in SAME[2:])]
    assert "Kendall" not in " ".join(summary(outcome(*mixed)))


@pytest.mark.parametrize(
    "who, words", [("informed", "who knows the defense"), ("perturbed", "sees the perturbed input")]
)
def test_who_gets_clearly_more_overturns_the_claim(who: str, words: str) -> None:
    overturned = SAME[0].model_copy(update={who: near(30.0)})
    assert any(words in sentence for sentence in summary(outcome(overturned, *SAME[1:])))
    tiny = value("a", 1.0, "10", half=1e-6).model_copy(update={who: near(1.00001, 1e-6)})
    assert not any(words in sentence for sentence in summary(outcome(tiny, *SAME[1:])))
    same = SAME[0].model_copy(update={who: near(1.05)})
    assert not any(words in sentence for sentence in summary(outcome(same, *SAME[1:])))


def test_too_few_rows_have_no_order() -> None:
    assert order(SAME[:2]) is None


def test_the_table_shows_ours_beside_the_published() -> None:
    table = outcome(*SAME).table()
    assert table.rows[0] == ["a", "1 ± 0 [10]"]
    digits = outcome(value("a", 1.23456, "9.2340")).table()
    assert digits.rows[0] == ["a", "1.2346 ± 0.1000 [9.2340]"]
