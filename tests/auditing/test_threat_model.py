"""What was supposed, withheld and left out is said in words that fit the audit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.auditing.threat_model import Attempted, assumptions, attacked_words, not_given, not_tried
from fedveil.clients.batch import ClientBatch
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.fields import declared
from fedveil.registry import attacks
from fedveil.tree import Tree

IG = Attempted(("inverting-gradients",), ("known",))
LINKING = Attempted(("inverting-gradients", "link"), ("known",), candidates=100)
KNOWN = "an attacker who knows the defense"


def task(*layers: nn.Module) -> fv.Task:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), *layers, nn.Linear(4, 2))
    return fv.Task(model=model, data=(torch.rand(20, 1, 2, 2), torch.arange(20) % 2), clients=2)


@declared
class Silent(Defense):
    """Says nothing of what an attacker who knows it would do."""

    name = "test-silent"

    def protect(self, update: Tree, batch: ClientBatch) -> Tree:
        return update


def tried(
    chain: Any = None, attempted: Attempted = IG, federation: fv.Federation | None = None, **audit: Any
) -> list[str]:
    return not_tried(Chain.of(chain), attempted, federation or fv.Federation(batch_size=8), fv.Audit(**audit))


def test_every_attack_that_was_left_out_is_named() -> None:
    others = sorted(attacks.entries().keys() - {"inverting-gradients"})
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
    assert not any("whole batches" in line for line in tried(batch_size=8))
    assert not any("whole batches" in line for line in tried(federation=fv.Federation(batch_size=1)))
    assert not any("whole batches" in line for line in tried(federation=fv.Federation(protocol="fedavg")))


def test_what_no_attack_of_ours_does_is_always_named() -> None:
    said = " ".join(tried())
    for words in ("learned prior", "many rounds", "malicious server", "membership"):
        assert words in said


def test_statistics_of_the_batch_are_withheld_where_there_are_any() -> None:
    statistics = "the statistics of the victim's batch"
    assert statistics in not_given(task(nn.BatchNorm1d(4)), IG)
    assert statistics not in not_given(task(), IG)
    assert "the random numbers that the defense drew" in not_given(task(), IG)


def test_who_links_is_given_the_original_and_that_is_said() -> None:
    assert not_given(task(), IG)[0] == "the clients' data, or any part of it"
    assert "who links updates has the examples behind them" in not_given(task(), LINKING)[0]

    def switches(attempted: Attempted) -> dict[str, str]:
        found = assumptions(task(), Chain.of("clip"), attempted, fv.Federation(), fv.Audit())
        return {each.switch: each.setting for each in found}

    assert switches(LINKING)["known candidates"] == "100 for each update"
    assert "known candidates" not in switches(IG)
    assert switches(IG)["labels"] == "known"
    assert "labels" not in switches(replace(LINKING, labels=()))


def test_what_was_attacked() -> None:
    own, federation = task(), fv.Federation()
    assert attacked_words(own, federation, fv.Audit(victims=16)) == (
        "16 updates of one image each, at the model as it was given"
    )
    many = fv.Audit(victims=1, batch_size=4, rounds=(1, 3))
    assert attacked_words(own, replace(federation, protocol="fedavg", local_epochs=2), many) == (
        "one update of 4 images (2 local epochs), in each of 2 rounds: at the model as it was given and at the start "
        "of round 3"
    )
