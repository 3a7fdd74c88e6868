"""The verdict follows from the rows by the printed thresholds, and never says "safe"."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.auditing.result import Cost, Estimate, Role, Row
from fedveil.auditing.verdict import judge, strongest
from fedveil.leakage.intervals import bootstrap

IMAGES = 40


def row(role: Role, identified: float, psnr: float = 10.0, attack: str = "ig") -> Row:
    values = [1.0] * round(identified * IMAGES) + [0.0] * (IMAGES - round(identified * IMAGES))
    interval = bootstrap(np.asarray(values), share=True)
    share = Estimate(mean=interval.mean, low=interval.low, high=interval.high, count=IMAGES)
    quality = Estimate(mean=psnr, low=psnr, high=psnr, count=IMAGES)
    return Row(
        attack=attack,
        role=role,
        metrics={"identified": share, "psnr": quality},
        values={"identified": values, "psnr": [psnr] * IMAGES},
    )


def table(ceiling: float, naive: float, adaptive: float, noise: float = 0.0, mean: float = 0.0) -> list[Row]:
    return [
        row("ceiling", ceiling, 30),
        row("naive", naive, 12),
        row("adaptive", adaptive, 22),
        row("noise-floor", noise, 5),
        row("mean-floor", mean, 11, attack=""),
    ]


def verdict(rows: list[Row], cost: Cost | None = None, **settings: float):  # type: ignore[no-untyped-def]
    given = {"exposed_above": 0.5, "gain": 0.0} | settings
    return judge(rows, cost or Cost(), "Formal guarantee: none.", groups=list(range(IMAGES)), among=100, **given)


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ((1.0, 0.1, 0.9), "exposed"),
        ((1.0, 0.9, 0.1), "exposed"),  # the strongest attacker counts, also when it is the naive one
        ((1.0, 0.1, 0.4), "partly exposed"),
        ((1.0, 0.0, 0.0), "no leakage found by these attacks"),
        ((0.0, 0.0, 0.0), "not judged"),  # the attack fails without a defense too: it says nothing
        ((0.3, 0.0, 0.0, 0.0, 0.3), "not judged"),  # the mean image does as well as the attack
    ],
)
def test_status(numbers: tuple[float, ...], status: str) -> None:
    found = verdict(table(*numbers))
    assert found.status == status
    assert "safe" not in " ".join([found.status, found.why, *found.sentences]).lower()


def test_the_threshold_is_a_setting_and_is_printed() -> None:
    rows = table(1.0, 0.1, 0.4)
    assert verdict(rows, exposed_above=0.2).status == "exposed"
    assert "20 %" in verdict(rows, exposed_above=0.2).why


def test_sentences_tell_both_attackers_the_floor_and_the_ceiling() -> None:
    leakage, cost, guarantee = verdict(table(1.0, 0.1, 0.9, mean=0.05)).sentences
    for part in (
        "knows the defense recognizes 90 %",
        "does not 10 %",
        "undefended: 100 %",
        "chance 1",
        "mean image 5",
        "22.0 dB",
    ):
        assert part in leakage
    assert "not measured" in cost
    assert guarantee == "Formal guarantee: none."


def test_cost_sentence() -> None:
    def share(mean: float) -> Estimate:
        return Estimate(mean=mean, low=mean - 0.01, high=mean + 0.01, count=1000)

    cost = Cost(rounds=3, defended=share(0.854), undefended=share(0.861), difference=share(-0.007), slowdown=1.034)
    sentence = verdict(table(1.0, 0.1, 0.9), cost).sentences[1]
    assert "86.1 % → 85.4 %" in sentence
    assert "-0.7 points [-1.7, +0.3]" in sentence
    assert "1.03 times" in sentence


def test_without_a_defense_the_undefended_row_leads() -> None:
    rows = [row("ceiling", 0.9), row("noise-floor", 0.0), row("mean-floor", 0.0, attack="")]
    lead = strongest(rows)
    assert lead is not None
    assert lead.role == "ceiling"
    assert verdict(rows).sentences[0].startswith("No defense: an attacker recognizes 90 %")


def test_the_strongest_attack_is_compared_with_its_own_ceiling_and_floor() -> None:
    weak = [row("ceiling", 0.2, attack="dlg"), row("adaptive", 0.1, attack="dlg"), row("noise-floor", 0, attack="dlg")]
    found = verdict([*weak, *table(1.0, 0.1, 0.9)])
    assert found.status == "exposed"
    assert "undefended: 100 %" in found.sentences[0]
