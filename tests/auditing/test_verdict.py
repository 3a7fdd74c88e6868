"""The verdict follows from the rows by the printed thresholds, in plain words, and never says "safe"."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.auditing.judgment import Terms
from fedveil.auditing.result import TOGETHER, Answer, Cost, Estimate, Question, RoundUtility, Row, Verdict
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import strongest, worst_case
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.verdict import judge, settled
from fedveil.leakage.intervals import bootstrap
from fedveil.leakage.modalities import modality
from fedveil.leakage.truths import Truths

PICTURES = modality("pictures")

IMAGES = 40
CONFIG = {
    "task": {"name": "digits", "model": "mlp:hidden=[8]", "clients": 4, "split": "own", "seed": 0},
    "federation": {"rounds": 10, "train": True},
    "audit": {"victims": IMAGES},
    "attack": [{"name": "inverting-gradients", "steps": 100}],
    "defense": [{"name": "gradient-dropout", "keep": 0.6}],
    "seed": 0,
}


def estimate(values: list[float]) -> Estimate:
    found = bootstrap(np.asarray(values), share=set(values) <= {0.0, 1.0})
    return Estimate(mean=found.mean, low=found.low, high=found.high, count=found.count)


def row(role: Role, identified: float, psnr: float = 10.0, attack: str = "inverting-gradients", **more: Any) -> Row:
    images, similar = more.pop("images", IMAGES), more.pop("ssim", 0.3)
    features = more.pop("features", None)

    def picked(share: float) -> list[float]:
        return [1.0] * round(share * images) + [0.0] * (images - round(share * images))

    values = {"identified": picked(identified), "psnr": [psnr] * images, "ssim": [similar] * images}
    if features is not None:
        values["identified_features"] = picked(features)
    metrics = {name: estimate(each) for name, each in values.items()}
    return Row(attack=attack, role=role, metrics=metrics, values=values, **more)


def table(
    ceiling: float, naive: float, adaptive: float, noise: float = 0.0, mean: float = 0.0, **more: Any
) -> list[Row]:
    return [
        row("ceiling", ceiling, 30, ssim=0.9, **more),
        row("naive", naive, 12, **more),
        row("adaptive", adaptive, 22, ssim=0.6, **more),
        row("noise-floor", noise, 5, **more),
        row("mean-floor", mean, 11, attack="", **more),
    ]


def verdict(rows: list[Row], cost: Cost | None = None, uninformed: tuple[str, ...] = (), **settings: Any) -> Verdict:
    terms = Terms(AuditSettings(**({"victims": IMAGES} | settings)), PICTURES, 100, CONFIG, uninformed)
    return judge(rows, cost or Cost(), "Formal guarantee: none.", terms)


def answer(found: Verdict, question: Question = "reconstruct") -> Answer:
    given = found.answer(question)
    assert given is not None
    return given


def told(found: Verdict) -> str:
    """All that a reader of the verdict meets."""
    return " ".join(
        [found.status, found.why, *found.sentences, *found.notes, *found.thresholds, found.next_step]
        + [each.words for each in found.warnings]
        + [text for each in found.answers for text in (each.asked, each.why, each.sentence, each.next_step)]
    )


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
def test_status_in_plain_words(numbers: tuple[float, ...], status: str) -> None:
    found = verdict(table(*numbers))
    assert found.status == found.answers[0].status == status
    for word in ("safe", "db", "floor", "by features", "ceiling", "naive", "adaptive", "psnr"):
        assert not re.search(rf"\b{word}\b", told(found).lower()), word


def test_the_thresholds_are_settings_and_are_printed() -> None:
    rows = table(1.0, 0.1, 0.4)
    found = verdict(rows, exposed_above=0.2, rule_out=0.3)
    assert found.status == "exposed"
    assert "20 %" in found.why
    assert any("20 %" in line for line in found.thresholds)
    assert any("30 %" in line for line in found.thresholds)
    assert verdict(table(1.0, 0.0, 0.2), smallest_gain=0.4).status == "no leakage found by these attacks"


def test_the_first_sentence_says_what_the_strongest_attacker_gets() -> None:
    leakage, cost, guarantee = verdict(table(1.0, 0.1, 0.9, mean=0.05)).sentences
    assert re.fullmatch(
        r"An attacker who knows the defense picks the right image out of 100 for 90 % \[77–96\] of the updates "
        r"\(chance 1 %\), and gets a recognizable picture for 90 %\. Undefended: 100 % \[91–100\]\.",
        leakage,
    )
    assert "not measured" in cost
    assert guarantee == "Formal guarantee: none."
    naive = verdict(table(1.0, 0.9, 0.1)).sentences[0]
    assert naive.startswith("An attacker who does not know the defense picks the right image out of 100 for 90 %")
    assert "One who knows it: 10 %." in naive


def test_a_recognizable_picture_is_the_right_one_and_similar_enough() -> None:
    rows = table(1.0, 0.1, 0.9)
    found = verdict(rows, recognizable_from=0.7)
    assert answer(found).recognizable is not None
    assert answer(found).recognizable.mean == 0.0  # type: ignore[union-attr]  # identified, but unlike it
    assert any("at least 0.7" in note for note in found.notes)
    found = verdict(rows, recognizable_from=0.5)
    assert answer(found).recognizable is not None
    assert answer(found).recognizable.mean == 0.9  # type: ignore[union-attr]  # all are similar, but not all are the right one


def test_images_of_a_batch_are_counted_as_images_and_depend_on_each_other() -> None:
    rows = table(1.0, 0.1, 0.65)
    found = verdict(rows, batch_size=10, victims=4)
    assert "of the images" in found.sentences[0]
    assert answer(found).recognizable is not None
    batch, single = answer(found).recognizable, answer(verdict(rows)).recognizable
    assert batch is not None
    assert single is not None
    assert batch.low < single.low


def test_the_stronger_way_to_compare_counts() -> None:
    rows = [
        row("ceiling", 1.0, features=1.0),
        row("adaptive", 0.1, features=0.9),
        row("noise-floor", 0.0, features=0.0),
        row("mean-floor", 0.0, attack="", features=0.0),
    ]
    found = verdict(rows)
    assert (found.status, answer(found).measure) == ("exposed", "identified_features")
    assert "90 %" in found.sentences[0]
    assert any("what a classifier sees" in note for note in found.notes)


def test_without_a_defense_the_undefended_row_leads() -> None:
    rows = [row("ceiling", 0.9), row("noise-floor", 0.0), row("mean-floor", 0.0, attack="")]
    lead = strongest(rows, "reconstruct", PICTURES)
    assert lead is not None
    assert lead.role == "ceiling"
    assert verdict(rows).sentences[0].startswith("Without a defense, an attacker picks the right image")
    assert "Undefended" not in verdict(rows).sentences[0]


# ---- several attacks -----------------------------------------------------------------------------------------


def truths(updates: int = IMAGES) -> Truths:
    nothing = torch.zeros(updates, 1)
    return Truths(nothing, nothing, nothing, (1,) * updates)


def together(rows: list[Row]) -> list[Row]:
    return [*rows, *worst_case(rows, truths(), PICTURES)]


def picked(role: Role, first: int, count: int, attack: str, mse: float = 1.0) -> Row:
    """A row that picks `count` images from the place `first` on."""
    values = {"identified": [float(first <= place < first + count) for place in range(IMAGES)], "mse": [mse] * IMAGES}
    values["psnr"] = [10.0] * IMAGES
    metrics = {name: estimate(each) for name, each in values.items()}
    return Row(attack=attack, role=role, metrics=metrics, values=values)


def test_the_worst_case_over_attacks_is_taken_image_by_image() -> None:
    rows = [picked(role, 0, 8, "dlg") for role in ("ceiling", "adaptive")]  # type: ignore[arg-type]
    rows += [picked(role, 20, 8, "other", mse=0.5) for role in ("ceiling", "adaptive")]  # type: ignore[arg-type]
    rows += [picked("noise-floor", 0, 0, "dlg"), picked("noise-floor", 0, 0, "other"), picked("mean-floor", 0, 0, "")]
    worst = {row.role: row for row in worst_case(rows, truths(), PICTURES)}
    assert set(worst) == {"ceiling", "adaptive", "noise-floor"}
    assert worst["adaptive"].attack == TOGETHER
    assert worst["adaptive"].metrics["identified"].mean == 0.4  # none of the images is picked by both
    assert worst["adaptive"].metrics["mse"].mean == 0.5  # where less is more, the least
    found = verdict(together(rows))
    assert (found.status, answer(found).attack) == ("partly exposed", TOGETHER)
    assert "for 40 % [26–55] of the updates" in found.sentences[0]
    assert any("a guess may try as often" in note for note in found.notes)
    assert worst["adaptive"].winners == ["dlg"] * 20 + ["other"] * 8 + ["dlg"] * 12
    with pytest.raises(ValueError, match="worst case"):
        verdict(rows)


def test_the_sentence_names_the_attack_that_won_most_often() -> None:
    rows = [picked("ceiling", 0, IMAGES, name) for name in ("dlg", "other")]
    rows += [picked("noise-floor", 0, 0, name) for name in ("dlg", "other")]
    found = verdict(together([*rows, picked("adaptive", 0, 20, "dlg"), picked("adaptive", 20, 12, "other")]))
    assert "(chance 1 %), most often with dlg (20 of 32)." in found.sentences[0]
    assert answer(found).winner == "dlg"
    found = verdict(together([*rows, picked("adaptive", 0, 0, "dlg"), picked("adaptive", 20, 12, "other")]))
    assert "(chance 1 %), each time with other." in found.sentences[0]
    found = verdict(together([*rows, picked("adaptive", 0, 0, "dlg"), picked("adaptive", 0, 0, "other")]))
    assert " with " not in found.sentences[0]
    assert answer(found).winner == ""
    assert answer(verdict(table(1.0, 0.1, 0.9))).winner == ""  # one attack alone has nobody to win against


def test_a_question_is_settled_where_every_round_is_exposed() -> None:
    def rounds(*adaptive: float) -> list[Row]:
        apart = [
            each.model_copy(update={"round": number})
            for number, share in enumerate(adaptive, 1)
            for each in table(1.0, 0.1, share)
        ]
        return [*table(1.0, 0.1, sum(adaptive) / len(adaptive)), *apart]

    terms = Terms(AuditSettings(victims=IMAGES), PICTURES, 100, CONFIG)
    assert settled(table(1.0, 0.1, 0.9), "reconstruct", terms)
    assert not settled(table(1.0, 0.1, 0.4), "reconstruct", terms)  # partly exposed: a better attack may show more
    assert not settled(table(1.0, 0.0, 0.0), "reconstruct", terms)  # nothing found is never settled
    assert settled(rounds(0.9, 0.95), "reconstruct", terms)
    assert not settled(rounds(1.0, 0.6), "reconstruct", terms)  # although all rounds together are exposed
    assert not settled(table(1.0, 0.1, 0.9), "link", terms)
    assert not settled([], "reconstruct", terms)
    assert not settled(table(1.0, 0.1, 0.9), "reconstruct", replace(terms, settings=AuditSettings(exposed_above=0.95)))


def test_who_tries_many_attacks_is_held_against_as_many_guesses() -> None:
    rows = []
    for place in range(8):  # of noise that has its luck too, each time with other images
        attack = f"attack-{place}"
        rows += [picked("ceiling", 0, IMAGES, attack), picked("adaptive", 5 * place, 2, attack)]
        rows.append(picked("noise-floor", 5 * place + 2, 2, attack))
    found = verdict(together(rows))
    assert answer(found).found is not None
    assert answer(found).found.mean == answer(found).guess.mean == 0.4  # type: ignore[union-attr]
    assert found.status == "not judged"  # 40 % against one floor of 5 % would have been a leak
    assert "a guess without the update (40 %)" in found.why


def test_with_one_attack_nothing_changes() -> None:
    assert worst_case(table(1.0, 0.1, 0.9), truths(), PICTURES) == []


def test_an_attack_that_does_not_work_does_not_undo_one_that_does() -> None:
    weak = [
        row("ceiling", 0.0, attack="dlg"),
        row("adaptive", 0.0, 99, attack="dlg"),
        row("noise-floor", 0, attack="dlg"),
    ]
    rows = [each for each in table(1.0, 0.0, 0.0) if each.role != "naive"]
    assert verdict(together([*weak, *rows])).status == "no leakage found by these attacks"
    strong = [each for each in table(1.0, 0.1, 0.9) if each.role != "naive"]
    found = verdict(together([*weak, *strong]))
    assert found.status == "exposed"
    assert "Undefended: 100 %" in found.sentences[0]


# ---- linking -------------------------------------------------------------------------------------------------


def link(role: Role, share: float, updates: int = IMAGES, **more: Any) -> Row:
    values = {"linked": [1.0] * round(share * updates) + [0.0] * (updates - round(share * updates))}
    metrics = {"linked": estimate(values["linked"])}
    return Row(attack="link", role=role, question="link", metrics=metrics, values=values, **more)


def links(ceiling: float, naive: float, adaptive: float, noise: float = 0.0, **more: Any) -> list[Row]:
    shares: dict[Role, float] = {"ceiling": ceiling, "naive": naive, "adaptive": adaptive, "noise-floor": noise}
    return [link(role, share, **more) for role, share in shares.items()]


def test_linking_is_a_question_of_its_own() -> None:
    found = verdict([*table(1.0, 0.1, 0.4), *links(1.0, 0.2, 0.95)])
    assert (found.status, found.question) == ("exposed", "link")
    assert [(each.question, each.status) for each in found.answers] == [
        ("reconstruct", "partly exposed"),
        ("link", "exposed"),
        ("member", "not judged"),
    ]
    assert answer(found, "member").why == "No attack of this audit asks that."
    assert found.sentences[:2] == [
        "An attacker who knows the defense links 95 % [83–99] of the updates to the right image out of 100 by "
        "comparing updates (chance 1 %). Undefended: 100 % [91–100].",
        answer(found).sentence,
    ]
    linked = answer(found, "link")
    assert (linked.role, linked.attack, linked.measure, linked.floor) == ("adaptive", "link", "linked", "noise-floor")
    assert linked.found is not None
    assert linked.found.mean == 0.95
    assert linked.undefended is not None
    assert linked.undefended.mean == 1.0
    assert linked.guess is not None
    assert linked.guess.mean == 0.0
    assert linked.recognizable is None
    for word in ("safe", "db", "floor", "ceiling", "naive", "adaptive", "psnr"):
        assert not re.search(rf"\b{word}\b", told(found).lower()), word


def test_the_worse_answer_is_the_headline_and_of_equals_what_is_rebuilt() -> None:
    found = verdict([*table(1.0, 0.1, 0.9), *links(1.0, 0.0, 0.3)])
    assert (found.status, found.question) == ("exposed", "reconstruct")
    assert found.sentences[1].startswith("An attacker who knows the defense links 30 %")
    assert not any("So updates can be linked" in sentence for sentence in found.sentences)
    assert verdict([*table(1.0, 0.1, 0.9), *links(1.0, 0.0, 0.9)]).question == "reconstruct"


def test_linked_but_not_rebuilt_is_told_as_exactly_that() -> None:
    found = verdict([*table(1.0, 0.0, 0.0), *links(1.0, 0.0, 0.9)])
    assert (found.status, answer(found).status) == ("exposed", "no leakage found by these attacks")
    assert found.sentences[2] == (
        "So updates can be linked to the images behind them, although what these attacks rebuilt from them is no "
        "better than a guess without the update."
    )
    weak = verdict([*table(0.0, 0.0, 0.0), *links(1.0, 0.0, 0.9)])
    assert (weak.status, weak.question, answer(weak).status) == ("exposed", "link", "not judged")
    assert "; whether a picture can be rebuilt from them is not judged." in weak.sentences[2]
    assert weak.next_step == ""  # the headline is settled; the other question says what would settle it
    assert "more steps" in answer(weak).next_step
    assert "steps=400" in answer(weak).command


@pytest.mark.parametrize(
    ("rebuilt", "linked", "status", "question"),
    [
        ((0.0, 0.0, 0.0), (1.0, 0.0, 0.0), "no leakage found by these attacks", "link"),  # a weak attack says nothing
        ((1.0, 0.0, 0.0), (0.0, 0.0, 0.0), "no leakage found by these attacks", "reconstruct"),
        ((1.0, 0.0, 0.0), (0.05, 0.0, 0.0), "not judged", "link"),  # what is open is not made good by finding nothing
        ((0.05, 0.0, 0.0), (1.0, 0.0, 0.0), "not judged", "reconstruct"),
        ((0.0, 0.0, 0.0), (1.0, 0.0, 0.3), "partly exposed", "link"),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), "not judged", "reconstruct"),
    ],
)
def test_the_headline_over_both_questions(
    rebuilt: tuple[float, float, float], linked: tuple[float, float, float], status: str, question: str
) -> None:
    found = verdict([*table(*rebuilt), *links(*linked)])
    assert (found.status, found.question) == (status, question)


def test_linking_alone_is_judged_by_its_own_floor_and_counts_updates() -> None:
    found = verdict(links(1.0, 0.1, 0.3, noise=0.3))
    assert found.status == "no leakage found by these attacks"
    assert "a guess without the update (30 %)" in found.why
    assert answer(found).why == "No attack of this audit asks that."
    few = verdict(links(1.0, 0.0, 0.25, updates=4), victims=4, batch_size=8)
    assert few.why.startswith("Too few updates: with 4 of them")
    updates = int(re.findall(r"Use about (\d+) updates", few.next_step)[0])
    assert verdict(links(1.0, 0.0, 0.25, updates=updates), victims=updates, batch_size=8).status == "partly exposed"
    assert "to the right batch out of 100" in few.sentences[0]


def test_each_round_of_links_is_judged_by_its_own() -> None:
    rows = [*links(1.0, 0.0, 0.45), *links(1.0, 0.0, 0.0, round=1), *links(1.0, 0.0, 0.9, round=5)]
    found = verdict(rows)
    assert (found.status, answer(found, "link").round) == ("exposed", 5)
    assert found.sentences[0].startswith("At the start of round 5, an attacker who knows the defense links")


def test_a_formal_bound_stands_beside_the_measured_share_and_must_hold() -> None:
    held = verdict(links(1.0, 0.0, 0.3, bound=0.37))
    assert answer(held, "link").bound == 0.37
    assert not any("than the formal guarantee allows" in each.words for each in held.warnings)
    broken = verdict(links(1.0, 0.0, 0.9, bound=0.3612))
    assert any(
        each.loud and "90 % [77–96], than the formal guarantee allows any attacker, 37 %" in each.words
        for each in broken.warnings
    )


def test_a_comparison_without_the_exact_law_says_so() -> None:
    assert any("a better test may link more" in note for note in verdict(links(1.0, 0.0, 0.9, exact=False)).notes)
    exact = verdict(links(1.0, 0.0, 0.9, exact=True)).notes
    assert any("Nothing is rebuilt." in note for note in exact)
    assert not any("a better test" in note for note in exact)


# ---- captured updates, of which nobody has the undefended one ---------------------------------------------------


def test_without_the_undefended_update_a_leak_is_a_leak_and_its_absence_says_nothing() -> None:
    found = verdict([row("naive", 0.9), row("noise-floor", 0.0)])
    assert found.status == "exposed"
    assert found.sentences[0].startswith("An attacker who takes the updates as they are picks the right image")
    assert "Undefended" not in found.sentences[0]
    found = verdict([row("naive", 0.0), row("adaptive", 0.0), row("noise-floor", 0.0)])
    assert found.status == "not judged"
    assert "whether the attack works on undefended updates" in found.why
    assert "without a defense" in found.next_step


def test_where_nothing_could_be_told_apart_nothing_is_judged() -> None:
    bare = [each.model_copy(update={"metrics": {}, "values": {}}) for each in table(1.0, 0.0, 0.0)]
    found = verdict([*bare, *links(1.0, 0.0, 0.9)])
    assert answer(found).status == "not judged"
    assert answer(found).why == "There were no other images to tell the right one from."
    with pytest.raises(ValueError, match="at least one"):
        verdict(bare)


# ---- not judged ----------------------------------------------------------------------------------------------


def test_too_few_images_are_told_from_an_attack_that_does_not_work() -> None:
    few = verdict(table(1.0, 0.0, 0.25, images=4), victims=4)
    assert few.status == "not judged"
    assert few.why.startswith("Too few images: with 4 of them")
    updates = int(re.findall(r"Use about (\d+) updates", few.next_step)[0])
    assert 4 < updates < 200
    assert few.command == (
        "fedveil audit --data digits --model 'mlp:hidden=[8]' "
        f"--victims {updates} --defense gradient-dropout:keep=0.6 --attack inverting-gradients:steps=100"
    )
    # So many images of the same kind do settle it.
    assert verdict(table(1.0, 0.0, 0.25, images=updates), victims=updates).status == "partly exposed"

    weak = verdict(table(0.0, 0.0, 0.0))
    assert weak.why.startswith("This attack does not work here: even without a defense")
    assert "steps=400" in weak.command
    assert "more steps" in weak.next_step
    assert "--attack-batch-size" not in weak.command
    batch = verdict(table(0.0, 0.0, 0.0), batch_size=4, victims=10)
    assert "single image" in batch.next_step


def test_a_suite_that_does_not_work_is_followed_by_a_larger_one() -> None:
    weak = [each.model_copy(update={"attack": "dlg"}) for each in table(0.0, 0.0, 0.0) if each.attack]
    rows = together([*table(0.0, 0.0, 0.0), *weak])

    def judged(suite: str) -> Verdict:
        settings = AuditSettings(victims=IMAGES)
        config = {name: value for name, value in CONFIG.items() if name != "attack"} | {"suite": suite}
        return judge(rows, Cost(), "", Terms(settings, PICTURES, 100, config))

    found = judged("quick")
    assert found.why.startswith("None of these attacks works here: even without a defense, 0 % [0–9], they are no")
    assert "the suite `standard`" in found.next_step
    assert found.command.endswith("--defense gradient-dropout:keep=0.6")  # which is the default
    assert judged("standard").command.endswith("--suite thorough")
    last = judged("thorough")
    assert "easier to invert" in last.next_step
    assert last.command == ""


def test_one_image_is_too_few_whatever_it_shows() -> None:
    for numbers in ((1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
        found = verdict(table(*numbers, images=1), victims=1)
        assert found.status == "not judged"
        assert found.why.startswith("Too few images")
        assert "Use about" in found.next_step


def test_an_undefended_attack_that_shows_little_needs_more_images() -> None:
    found = verdict(table(0.05, 0.0, 0.0))
    assert found.status == "not judged"
    assert found.why.startswith("Too few images")
    updates = int(re.findall(r"Use about (\d+) updates", found.next_step)[0])
    assert IMAGES < updates <= 1000


def test_nothing_is_granted_without_an_attacker_who_knows_the_defense() -> None:
    rows = table(1.0, 0.0, 0.0)
    found = verdict(rows, uninformed=("mine",))
    assert found.status == "not judged"
    assert "no attacker who knows the defense was tried" in found.why
    assert any(each.loud and "mine does not say" in each.words for each in found.warnings)
    assert "who knows the defense" not in found.sentences[0].replace("does not know", "")
    assert "`knowledge`" in found.next_step
    # What is seen to leak leaks all the same.
    assert verdict(table(1.0, 0.9, 0.9), uninformed=("mine",)).status == "exposed"
    assert "who does not know" in verdict(table(1.0, 0.0, 0.9), uninformed=("mine",)).sentences[0]

    naive = [each for each in rows if each.role != "adaptive"]
    found = verdict(naive, attackers="naive")
    assert found.status == "not judged"
    assert "--attackers" not in found.command  # both, the default
    assert found.command.startswith("fedveil audit ")


# ---- several rounds ------------------------------------------------------------------------------------------


def test_each_round_is_judged_by_its_own_rows_and_the_worst_counts() -> None:
    pooled = table(1.0, 0.0, 0.45)
    found = verdict([*pooled, *table(1.0, 0.0, 0.0, round=1), *table(1.0, 0.0, 0.9, round=5)])
    assert (found.status, answer(found).round) == ("exposed", 5)
    assert found.sentences[0].startswith("At the start of round 5, an attacker who knows the defense picks")
    assert "worst of the attacked rounds; round 1: no leakage found by these attacks (0 %)." in found.why
    # A round that could not be judged is not made good by one in which nothing was found.
    found = verdict([*table(0.5, 0, 0), *table(1.0, 0.0, 0.0, round=1), *table(0.0, 0.0, 0.0, round=5)])
    assert (found.status, answer(found).round) == ("not judged", 5)
    lead = strongest([*pooled, *table(1.0, 0.0, 0.9, round=5)], "reconstruct", PICTURES)
    assert lead is not None
    assert lead.round is None  # the mark in the table is for all rounds together


# ---- cost ----------------------------------------------------------------------------------------------------


def share(mean: float, half: float = 0.01) -> Estimate:
    return Estimate(mean=mean, low=mean - half, high=mean + half, count=1000)


def cost(**more: Any) -> Cost:
    fields: dict[str, Any] = {
        "rounds": 30,
        "defended": share(0.854),
        "undefended": share(0.861),
        "difference": share(-0.007, 0.01),
        "slowdown": 1.034,
        "slowdown_interval": Estimate(mean=1.034, low=1.01, high=1.06, count=29),
        "chance": 0.1,
        "majority": 0.12,
    }
    return Cost(**(fields | more))


def warned(found: Cost, **settings: Any) -> list[tuple[bool, str]]:
    return [(each.loud, each.words) for each in verdict(table(1.0, 0.1, 0.9), found, **settings).warnings]


def test_cost_sentence() -> None:
    sentence = verdict(table(1.0, 0.1, 0.9), cost()).sentences[1]
    assert sentence == (
        "Cost: test accuracy 86.1 % → 85.4 % after 30 rounds (−0.7 points [−1.7, +0.3]); a round takes 1.03 times as "
        "long [1.01–1.06]."
    )
    assert warned(cost()) == []


def test_a_time_within_noise_is_said_to_be() -> None:
    noisy = cost(slowdown_interval=Estimate(mean=1.034, low=0.95, high=1.1, count=29))
    assert "within noise [0.95–1.10]" in verdict(table(1.0, 0.1, 0.9), noisy).sentences[1]
    ((loud, words),) = warned(cost(slowdown_interval=None))
    assert not loud
    assert "Too few rounds were timed" in words


@pytest.mark.parametrize(
    ("undefended", "defended", "words"),
    [
        (0.125, 0.125, "neither with the defense nor without"),
        (0.125, 0.5, "not even without a defense"),
        (0.861, 0.125, "Under the defense the model has not learned"),
    ],
)
def test_an_accuracy_that_needs_no_model_says_nothing(undefended: float, defended: float, words: str) -> None:
    found = warned(cost(undefended=share(undefended), defended=share(defended)))
    assert any(loud and words in said and "12.0 %" in said for loud, said in found)


def test_a_large_cost_is_loud_and_few_rounds_are_named() -> None:
    large = cost(defended=share(0.76), difference=share(-0.1, 0.03))
    assert (True, "Large cost: accuracy falls by more than 5 points.") in warned(large)
    assert not any(loud for loud, _ in warned(large, large_drop=0.08))  # the interval reaches to −7
    assert any("Only 2 rounds of training" in words for _, words in warned(cost(rounds=2)))
    history = [RoundUtility(round=i, undefended=value, defended=None) for i, value in enumerate((0.5, 0.8, 0.86))]
    assert any("still learning (+6.0 points" in words for _, words in warned(cost(history=history)))


def test_small_samples_are_noted() -> None:
    assert any("only 8 images" in note for note in verdict(table(1.0, 0.1, 1.0, images=8), victims=8).notes)
    assert not any("rests on" in note for note in verdict(table(1.0, 0.1, 1.0)).notes)
