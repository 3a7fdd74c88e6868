"""From findings to rows: each role by itself, kept whole, and then beside the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

import fedveil as fv
from fedveil.attacks.finding import Links, Reconstruction
from fedveil.attacks.threat import ThreatModel
from fedveil.auditing.result import TOGETHER, Row
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import RoleScore, attack_run, images_of, rows_of, score_finding, score_given
from fedveil.leakage.pictures import Pictures
from fedveil.leakage.truths import Truths

GRAY = fv.Normalization((0.5,), (0.25,))
KIND = Pictures(GRAY)
VICTIMS, SIZE, OTHERS = 4, 2, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return GRAY.normalize(torch.rand(*shape, 1, 6, 6, generator=torch.Generator().manual_seed(seed)))


def truths(rounds: tuple[int, ...] = (1, 1, 1, 1), rows: slice = slice(None)) -> Truths:
    originals = drawn(VICTIMS, SIZE)
    labels = torch.tensor([[0, 1], [1, 1], [2, 0], [0, 0]])
    distractors = drawn(VICTIMS, SIZE, OTHERS, seed=1)
    place = torch.tensor([3, 0, 6, 2])
    return Truths(
        originals=originals[rows],
        labels=labels[rows],
        seen=originals[rows],
        rounds=rounds,
        mean_input=originals.mean((0, 1)),
        distractors=distractors[rows].flatten(0, 1),
        place=place[rows],
    )


def rebuilt(noise: float, seed: int = 2, rows: slice = slice(None), **more: Any) -> Reconstruction:
    """The originals with so much noise, in another order within each batch; iterates that come nearer."""
    true = drawn(VICTIMS, SIZE)
    found = (true + noise * drawn(VICTIMS, SIZE, seed=seed)).flip(1)[rows]
    fields: dict[str, Any] = {
        "inputs": found,
        "labels": torch.tensor([[1, 0], [1, 2], [0, 1], [0, 0]])[rows],
        "cost": torch.tensor([0.1, 0.2, 0.3, 0.4])[rows],
        "seconds": 2.0,
        "steps": (1, 2, 3),
        "costs": torch.tensor([[3.0, 2.0, 1.0]] * VICTIMS)[rows],
        "iterates": [found + step for step in (0.3, 0.2, 0.1)],
    }
    return Reconstruction(**(fields | more))


def links(*picked: int, exact: bool = True) -> Links:
    scores = torch.zeros(len(picked), OTHERS + 1).scatter(1, torch.tensor(picked)[:, None], 1.0)
    return Links(scores, torch.full((len(picked),), exact), seconds=0.5)


def scored(role: Role, noise: float, attack: str = "one", true: Truths | None = None, **more: Any) -> RoleScore:
    return score_finding(attack, role, rebuilt(noise, **more), true or truths(), KIND)


def by_role(rows: list[Row], **more: Any) -> dict[Role, Row]:
    wanted = {"round": None, "question": "reconstruct", "attack": "one"} | more
    return {row.role: row for row in rows if {name: getattr(row, name) for name in wanted} == wanted}


def test_a_reconstruction_becomes_values_pictures_and_what_was_on_the_way() -> None:
    score = scored("naive", 0.1)
    assert (score.attack, score.role, score.question, score.seconds) == ("one", "naive", "reconstruct", 2.0)
    assert {value.shape for value in score.values.values()} == {(VICTIMS * SIZE,)}
    assert score.values["attack_loss"].tolist() == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4])
    assert score.labels is not None
    assert score.labels.tolist() == [1.0, 0.5, 0.5, 1.0]  # repeats count, order does not
    assert score.exhibit is not None
    # In the order of the originals, although the attack gave them the other way round.
    near = (score.exhibit - KIND.exhibit(truths().originals.flatten(0, 1))).abs().mean()
    assert near < 0.05
    assert set(score.on_the_way["ssim"]) == {"1/3", "2/3", "all"}
    assert "rdlv" not in score.values  # which needs the floors


def test_a_role_alone_is_the_role_among_others() -> None:
    alone = scored("naive", 0.1)
    scored("ceiling", 0.0)
    again = scored("naive", 0.1)
    assert alone.facts() == again.facts()
    assert all(torch.equal(value, again.tensors()[name]) for name, value in alone.tensors().items())


@pytest.mark.parametrize("linking", [False, True], ids=["reconstruct", "link"])
def test_a_score_is_kept_whole(linking: bool) -> None:
    score = score_finding("link", "naive", links(3, 0, 1, 2), truths(), KIND) if linking else scored("naive", 0.1)
    back = RoleScore.read(load(save({k: v.contiguous() for k, v in score.tensors().items()})), score.facts())
    assert back.facts() == score.facts()
    assert {*back.tensors()} == {*score.tensors()}
    assert all(torch.equal(value, score.tensors()[name]) for name, value in back.tensors().items())
    assert back.steps == score.steps
    assert rows_of([back], truths(), KIND) == rows_of([score], truths(), KIND)


def test_rounds_scored_apart_are_rounds_scored_together() -> None:
    rounds = (1, 1, 5, 5)
    first, second = slice(0, 2), slice(2, 4)
    apart = RoleScore.concat(
        [scored("naive", 0.1, true=truths(rounds[part], part), rows=part) for part in (first, second)]
    )
    whole = scored("naive", 0.1, true=truths(rounds))
    assert all(torch.equal(value, whole.tensors()[name]) for name, value in apart.tensors().items())
    assert apart.seconds == 2 * whole.seconds
    assert attack_run([apart], truths(rounds), {}).curves == attack_run([whole], truths(rounds), {}).curves


def test_links_are_counted_by_update() -> None:
    picks = links(3, 0, 1, 2, exact=False)  # three of four
    score = score_finding("link", "naive", picks, truths(), KIND)
    assert score.values["linked"].tolist() == [True, True, False, True]
    ceiling = score_finding("link", "ceiling", links(3, 0, 6, 2), truths(), KIND)
    rows = by_role(rows_of([score, ceiling], truths(), KIND, bound=0.37), question="link", attack="link")
    row = rows["naive"]
    assert row.metrics["linked"].mean == 0.75
    assert (row.metrics["linked"].count, row.exact, row.bound, row.strongest) == (VICTIMS, False, 0.37, True)
    assert (rows["ceiling"].exact, rows["ceiling"].bound, rows["ceiling"].strongest) == (True, None, False)
    run = attack_run([score, ceiling], truths(), {})
    assert (run.question, run.steps, run.restarts, run.curves, run.on_the_way) == ("link", None, None, [], {})
    with pytest.raises(ValueError, match="where the originals stand"):
        score_finding("link", "naive", picks, Truths(drawn(4, 1), torch.zeros(4, 1), drawn(4, 1), (1,) * 4), KIND)


def test_each_role_is_related_to_the_better_floor_of_its_own_attack() -> None:
    true = truths()
    assert true.mean_input is not None
    scores = [scored("naive", 0.3), scored("noise-floor", 5.0), scored("naive", 0.3, "two")]
    scores += [scored("noise-floor", 0.5, "two"), score_given("mean-floor", true.mean_input, true, KIND)]
    rows = rows_of(scores, true, KIND)
    one, two = by_role(rows), by_role(rows, attack="two")
    none = by_role(rows, attack="")
    mean, far, near = (row.metrics["ssim"].mean for row in (none["mean-floor"], one["noise-floor"], two["noise-floor"]))
    assert far < mean < near

    def relative(row: Row, floor: Row) -> list[float]:
        pairs = zip(row.values["ssim"], floor.values["ssim"], strict=True)
        return [(found - guess) / max(guess, 0.01) for found, guess in pairs]

    assert one["naive"].values["rdlv"] == pytest.approx(relative(one["naive"], none["mean-floor"]))
    assert two["naive"].values["rdlv"] == pytest.approx(relative(two["naive"], two["noise-floor"]))
    assert none["mean-floor"].values["rdlv"] == [0.0] * VICTIMS * SIZE


def test_the_worst_case_of_several_attacks_is_a_row_and_not_the_strongest() -> None:
    rows = rows_of([scored("naive", 0.3), scored("naive", 0.1, "two")], truths((1, 1, 5, 5)), KIND)
    (worst,) = by_role(rows, attack=TOGETHER).values()
    assert worst.metrics["mse"].mean <= by_role(rows, attack="two")["naive"].metrics["mse"].mean
    assert [row.attack for row in rows if row.strongest] == ["two"]
    assert worst.winners == ["two"] * VICTIMS * SIZE  # of equally many picked, the one that comes nearer
    fifth = by_role(rows, attack=TOGETHER, round=5)["naive"]  # of each round, too
    assert fifth.winners == ["two"] * 2 * SIZE
    assert by_role(rows)["naive"].winners == []


def test_winners_and_threats_of_a_round_are_those_of_its_updates() -> None:
    rounds = (1, 5, 1, 5)
    first = score_finding("a", "naive", links(3, 1, 1, 1), truths(rounds), KIND)
    second = score_finding("b", "naive", links(1, 0, 1, 2), truths(rounds), KIND)
    threats = {"a": ThreatModel(has=("labels",)), "b": ThreatModel(may=("guesses",))}
    rows = rows_of([first, second], truths(rounds), KIND, threats=threats)
    found = {row.round: row for row in rows if row.attack == TOGETHER}
    assert {number: row.winners for number, row in found.items()} == {
        None: ["a", "b", "a", "b"],
        1: ["a", "a"],
        5: ["b", "b"],
    }
    assert {row.threat.words for row in found.values() if row.threat} == {"labels, guesses"}
    assert {row.threat.words for row in rows if row.threat and row.attack == "a"} == {"labels"}


def test_a_round_has_rows_of_its_own() -> None:
    rounds = (1, 5, 1, 5)
    link = score_finding("link", "naive", links(3, 1, 6, 1), truths(rounds), KIND)
    rows = rows_of([scored("naive", 0.1), link], truths(rounds), KIND, bound=0.5)
    whole, first, fifth = (by_role(rows, round=number)["naive"] for number in (None, 1, 5))
    assert whole.values["mse"][:2] + whole.values["mse"][4:6] == first.values["mse"]
    assert whole.values["mse"][2:4] + whole.values["mse"][6:] == fifth.values["mse"]
    linked = [by_role(rows, round=number, question="link", attack="link")["naive"] for number in (1, 5)]
    assert [row.metrics["linked"].mean for row in linked] == [1.0, 0.0]
    assert [(row.bound, row.exact) for row in linked] == [(0.5, True)] * 2
    assert not any(row.strongest for row in rows if row.round is not None)


def test_a_cost_that_is_not_finite_counts_as_the_largest_and_is_flagged() -> None:
    lost = scored("naive", 0.1, cost=torch.tensor([0.5, math.nan, 2.0, math.inf]))
    row = by_role(rows_of([lost], truths(), KIND))["naive"]
    assert row.values["attack_loss"] == [0.5, 0.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert row.values["diverged"] == [0, 0, 1, 1, 0, 0, 1, 1]
    all_lost = scored("naive", 0.1, cost=torch.full((VICTIMS,), math.nan))
    row = by_role(rows_of([all_lost], truths(), KIND))["naive"]
    assert "attack_loss" not in row.metrics
    assert row.metrics["diverged"].mean == 1.0


def test_an_attack_that_matches_nothing_has_no_cost_and_has_not_diverged() -> None:
    exact = scored("ceiling", 0.0, cost=torch.full((VICTIMS,), math.nan), steps=(), costs=None, iterates=())
    row = by_role(rows_of([exact], truths(), KIND))["ceiling"]
    assert not {"attack_loss", "diverged", "leakage_score"} & row.metrics.keys()
    assert attack_run([exact], truths(), {}).curves == []


def test_how_an_attack_went() -> None:
    scores = [scored("ceiling", 0.0), scored("naive", 0.1)]
    run = attack_run(scores, truths(), {"lr": 1}, labels_known=False, steps=3, restarts=2)
    assert (run.attack, run.seconds, run.victims, run.batch_size, run.steps) == ("one", 4.0, VICTIMS, SIZE, 3)
    assert run.label_recovery is not None
    assert run.label_recovery.mean == 0.75
    assert [(curve.role, curve.median) for curve in run.curves] == [
        ("ceiling", [3.0, 2.0, 1.0]),
        ("naive", [3.0, 2.0, 1.0]),
    ]
    assert run.on_the_way["ceiling"]["ssim"]["all"].count == VICTIMS * SIZE
    assert attack_run(scores, truths(), {}).label_recovery is None
    shown = images_of(scores, truths(), KIND)
    assert set(shown.reconstructions) == {("one", "ceiling"), ("one", "naive")}
    assert shown.originals.shape == (VICTIMS * SIZE, 1, 6, 6)
    assert 0 <= shown.originals.min() <= shown.originals.max() <= 1
