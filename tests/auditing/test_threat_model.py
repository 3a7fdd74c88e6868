"""What was supposed, withheld and left out is said in words that fit the audit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.auditing.auxiliary import Auxiliary
from fedveil.auditing.threat_model import (
    Attempted,
    Situation,
    assumptions,
    attacked_words,
    captured_in,
    in_rounds,
    not_given,
    not_tried,
    protocol_words,
)
from fedveil.defenses.base import Call, Defense
from fedveil.defenses.chain import Chain
from fedveil.fields import declared
from fedveil.leakage.pictures import Pictures
from fedveil.registry import attacks
from fedveil.tasks.examples import ArrayExamples
from fedveil.tree import Tree

from .learning import Nearest

IG = Attempted(("inverting-gradients",), ("known",))
LINKING = Attempted(("inverting-gradients", "link"), ("known",), candidates=100)
KNOWN = "an attacker who knows the defense"


def situation(*layers: nn.Module, chain: Any = None, **changed: Any) -> Situation:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), *layers, nn.Linear(4, 2))
    made = Situation(model, Chain.of(chain), updates=16, examples=1, rounds=(1,), trained_in=8)
    return replace(made, **changed)


@declared
class Silent(Defense):
    """Says nothing of what an attacker who knows it would do."""

    name = "test-silent"

    def protect(self, update: Tree, call: Call) -> Tree:
        return update


def tried(chain: Any = None, attempted: Attempted = IG, **changed: Any) -> list[str]:
    return not_tried(situation(chain=chain, **changed), attempted)


def supposed(attempted: Attempted = IG, *layers: nn.Module, **changed: Any) -> dict[str, tuple[str, str]]:
    found = assumptions(situation(*layers, **changed), attempted)
    return {each.switch: (each.setting, each.words) for each in found}


SENTENCES = {name for name in attacks.entries() if attacks.load(name).modalities == ("sentences",)}  # type: ignore[attr-defined]


def test_attacks_are_named_that_take_the_kind_of_data() -> None:
    assert "token-rows" in SENTENCES
    assert "token-rows" in tried(modality="sentences")[0]
    assert "ci-net" not in tried(modality="sentences")[0]
    assert "learned prior on the sentences" in " ".join(tried(modality="sentences"))


def test_every_attack_that_was_left_out_is_named() -> None:
    others = sorted(attacks.entries().keys() - {"inverting-gradients", *SENTENCES})
    assert tried()[0] == f"the attacks {', '.join(others)}"
    everything = Attempted(tuple(attacks.entries()))
    assert not any(line.startswith("the attacks ") for line in tried(attempted=everything))


@pytest.mark.parametrize(
    ("chain", "attackers", "named"),
    [
        ("clip", "both", False),
        ("clip", "adaptive", False),
        ("clip", "naive", True),
        (Silent(), "both", True),  # it was tried in name only
        (None, "naive", False),  # there is nothing to know
    ],
)
def test_a_missing_attacker_who_knows_the_defense_is_named_first(chain: Any, attackers: str, named: bool) -> None:
    assert (tried(chain, attackers=attackers)[0] == KNOWN) is named


def test_whole_batches_are_named_where_single_examples_were_attacked() -> None:
    assert any("whole batches of 8" in line for line in tried())
    assert "batches of 8, which leak less" in supposed()["attacked update"][1]
    for changed in ({"examples": 8}, {"trained_in": 1}, {"trained_in": None}):
        assert not any("whole batches" in line for line in tried(**changed))
        assert "leak less" not in supposed(**changed)["attacked update"][1]


def test_what_no_attack_of_ours_does_is_always_named() -> None:
    said = " ".join(tried())
    for words in ("learned prior", "many rounds", "malicious server", "membership"):
        assert words in said


def test_what_some_of_them_learned_from_is_told_and_not_called_withheld() -> None:
    other = "other data of the same kind, beyond its normalization"
    assert not_given(situation().model, IG)[-1] == other
    assert "auxiliary data" not in supposed()
    examples = ArrayExamples(torch.rand(1200, 1, 2, 2), torch.zeros(1200).long())
    data = Auxiliary(examples, "mnist", "training images", dropped=5, left=1000)
    learning = Attempted(("inverting-gradients", "learned-linear", "gias"), auxiliary=data, learned=("a", "b"))
    assert not_given(situation().model, learning)[-1] == f"{other} (but a and b had 1,200 training images of mnist)"
    setting, words = supposed(learning)["auxiliary data"]
    assert setting == "1,200 training images of mnist"
    assert words == (
        "a and b learned from 1,200 training images of mnist, with their labels, before any update was seen. None of "
        "these is a client's, a victim's, or one that a victim's is told from. Left out: 5 that the task holds too and "
        "1,000 beyond the most that are used (auxiliary_most)."
    )
    prior = "attacks with a learned prior on the images"
    assert f"{prior} (generators, diffusion models)" in tried()
    assert f"{prior} (diffusion models)" in tried(attempted=learning)


def test_a_generator_that_was_brought_along_is_told_and_not_called_withheld() -> None:
    what = "a generator trained on 20,000 training images of mnist"
    brought = Attempted(("gias",), ("known",), brought={"gias": what})
    assert not_given(situation().model, brought)[-1].endswith(f"(but gias had {what})")
    setting, words = supposed(brought)["brought by gias"]
    assert setting == what
    assert "was not checked" in words
    assert not any(switch.startswith("brought") for switch in supposed())


def test_attacks_that_were_left_out_are_named_with_the_reason_and_no_second_time() -> None:
    found = tried(attempted=replace(IG, left_out={"dlg": "it takes too long"}))
    assert found[0] == "the attack dlg: it takes too long"
    assert "idlg" in found[1]
    assert " dlg" not in found[1]


def test_what_is_known_of_an_attack_follows_from_what_it_needs() -> None:
    both = [fv.attacks.InvertingGradients(), Nearest()]
    examples = ArrayExamples(torch.rand(3, 1, 2, 2), torch.zeros(3).long())
    data = Auxiliary(examples, "mnist", "training images")
    found = Attempted.of(both, 100, data, {"dlg": "why"})
    assert (found.learned, found.auxiliary, found.labels) == (("test-nearest",), data, ("known",))
    alone = Attempted.of(both[:1], 100, data)
    assert (alone.learned, alone.auxiliary, alone.candidates) == ((), None, None)


def test_statistics_of_the_batch_are_withheld_where_there_are_any() -> None:
    statistics = "the statistics of the victim's batch"
    assert statistics in not_given(situation(nn.BatchNorm1d(4)).model, IG)
    assert statistics not in not_given(situation().model, IG)
    assert "the random numbers that the defense drew" in not_given(situation().model, IG)
    assert supposed(IG, nn.BatchNorm1d(4))["batch-norm statistics"][0] == "not known"
    assert supposed()["batch-norm statistics"][0] == "none in this model"


def test_dropout_is_named_where_there_is_any() -> None:
    assert supposed(IG, nn.Dropout(0.5))["dropout masks"][0] == "not known"
    assert "dropout masks" not in supposed(IG, nn.Dropout(0.0))


def test_who_links_is_given_the_original_and_that_is_said() -> None:
    model = situation().model
    assert not_given(model, IG)[0] == "the clients' data, or any part of it"
    assert "who links updates has the examples behind them" in not_given(model, LINKING)[0]
    assert supposed(LINKING)["known candidates"][0] == "100 for each update"
    assert "known candidates" not in supposed()
    assert supposed()["labels"][0] == "known"
    assert "labels" not in supposed(replace(LINKING, labels=()))


def test_local_steps_are_named_where_there_are_any() -> None:
    assert "local steps" not in supposed()
    assert "repeats the local steps" in supposed(local_steps="unrolled")["local steps"][1]
    assert "one gradient" in supposed(local_steps="pseudo-gradient")["local steps"][1]


@pytest.mark.parametrize("order, words", [("searched", "looks for"), ("same", "same order"), ("mean", "mean gradient")])
def test_what_is_supposed_of_the_order_is_said_where_there_is_one(order: str, words: str) -> None:
    setting, told = supposed(local_steps="unrolled", step_order=order)["order of the examples"]
    assert setting == order
    assert "is not known" in told
    assert words in told
    assert "order of the examples" not in supposed(local_steps="unrolled")
    assert "order of the examples" not in supposed(local_steps="pseudo-gradient", step_order=order)


@pytest.mark.parametrize(
    ("changed", "setting", "words"),
    [
        ({}, "none", "There is no defense to know."),
        ({"stated": False}, "none", "Whether there is a defense is not known"),
        ({"chain": "clip"}, "without and with", "The adaptive attacker knows the defense and its settings"),
        ({"chain": "clip", "attackers": "naive"}, "without", "The naive attacker"),
        ({"chain": Silent()}, "without and with", "test-silent does not say what knowing it tells"),
    ],
    ids=str,
)
def test_what_is_known_of_the_defense(changed: dict[str, Any], setting: str, words: str) -> None:
    found = supposed(**changed)["knowledge of the defense"]
    assert found[0] == setting
    assert words in found[1]


def test_what_was_attacked_in_an_audit() -> None:
    words = Pictures.words
    assert attacked_words(16, 1, words) == "16 updates of one image each"
    assert attacked_words(1, 4, words, local_epochs=2) == "one update of 4 images (2 local epochs)"
    assert in_rounds([1], untrained=True) == "at the untrained model"
    assert in_rounds([1, 3], untrained=False) == (
        "in each of 2 rounds: at the model as it was given and at the start of round 3"
    )
    assert protocol_words("fedavg", 4, 8, 2) == "FedAvg, 4 clients, batch 8, 2 local epochs"
    assert "Round 1 attacks the model before training." in supposed()["attacked update"][1]


def test_what_was_captured() -> None:
    assert captured_in([(3, 0), (1, 0), (3, 0)]) == "captured in rounds 1, 3 of client 0"
    assert captured_in([(number, number) for number in range(1, 9)]) == (
        "captured in rounds 1, 2, 3, 4, 5, … of 8 clients"
    )
    setting, words = supposed(captured="weights after 4 local steps", updates=2, examples=3)["captured update"]
    assert setting == "3 examples, round 1"
    assert words == (
        "The attacker has 2 captured updates. By what the capture says of itself, they are weights after 4 local "
        "steps, of 3 examples each."
    )
    assert "attacked update" not in supposed(captured="gradients")
