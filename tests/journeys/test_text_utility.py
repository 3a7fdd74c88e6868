"""What models of text are judged by: perplexity of running text, Matthews' correlation beside accuracy of classes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import fedveil as fv
from attacks.texts import running_task, text_task
from fedveil.auditing.cost import measure_cost
from fedveil.auditing.result import Cost, Estimate, RoundUtility
from fedveil.auditing.sentences import cost as told
from fedveil.auditing.sentences import large_drop
from fedveil.federation.evaluate import Evaluator
from fedveil.federation.settings import FederationSettings
from fedveil.report.view import cost_rows
from fedveil.study.advice import best_within
from fedveil.tasks.tokens import IGNORED, by_frequency


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> fv.Task:
    return running_task(tmp_path_factory.mktemp("running"))


def weights(task: fv.Task) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in task.model.named_parameters()}


def test_perplexity_is_that_of_all_next_tokens_together(running: fv.Task) -> None:
    inputs, targets = running.test.batch(list(range(len(running.test))))
    assert isinstance(inputs, dict)
    assert (targets == IGNORED).any()  # the last piece is shorter
    scores = running.model(**inputs).detach()
    total, count = 0.0, 0
    for row, wanted in zip(scores, targets, strict=True):
        for place in range(1, len(wanted)):
            if wanted[place] != IGNORED:
                total -= float(functional.log_softmax(row[place - 1].double(), 0)[wanted[place]])
                count += 1
    found = Evaluator(running).utility(weights(running), {})
    assert found.metric == "perplexity"
    assert found.test == pytest.approx(math.exp(total / count), rel=1e-5)
    assert 0 <= found.others["accuracy"] <= 1


def test_a_guess_by_frequency_is_the_perplexity_to_beat() -> None:
    targets = torch.tensor([[9, 1, 1, 2, 3], [9, 1, 1, 2, IGNORED]])  # the first of each row is no next token
    shares = [4 / 7, 2 / 7, 1 / 7]
    assert by_frequency(targets) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))


def test_training_lowers_perplexity_and_the_cost_of_a_defense_raises_it(running: fv.Task) -> None:
    settings = FederationSettings(rounds=3, batch_size=4, lr=0.5)
    bare, noisy = (fv.federate(running, d, settings=settings) for d in (None, "gaussian-noise:sigma=0.3"))
    assert bare.untrained.test is not None
    assert bare.utility.test is not None
    assert bare.utility.test < bare.untrained.test
    cost = measure_cost(running, bare, noisy)
    assert cost.undefended is not None
    assert cost.defended is not None
    assert cost.difference is not None
    assert cost.undefended.mean == pytest.approx(bare.utility.test)
    assert cost.difference.mean == pytest.approx(cost.defended.mean - cost.undefended.mean)
    assert cost.difference.low > 0
    assert cost.undefended.low < cost.undefended.mean < cost.undefended.high
    assert cost.majority == pytest.approx(by_frequency(running.test.labels))


def a_cost(defended: float) -> Cost:
    def exactly(value: float) -> Estimate:
        return Estimate(mean=value, low=value, high=value, count=9)

    return Cost(
        metric="perplexity",
        rounds=6,
        undefended=exactly(50.0),
        defended=exactly(defended),
        difference=exactly(defended - 50.0),
        history=[RoundUtility(round=5, defended=defended, undefended=50.2)] * 2,
        majority=400.0,
    )


def test_verdict_and_report_say_that_lower_is_better() -> None:
    worse = a_cost(60.0)
    assert "test perplexity (lower is better) 50 → 60" in told(worse)
    assert "(+10 [+10, +10])" in told(worse)
    assert "Test perplexity (lower is better)" in next(cost_rows(worse))[0]
    rows = [row[0] for row in cost_rows(worse)]
    assert "The same, guessing by how frequent each token is" in rows
    assert large_drop(worse, 0.05)
    assert not large_drop(a_cost(52.0), 0.05)
    assert not large_drop(a_cost(40.0), 0.05)


def test_large_costs_and_models_that_learned_nothing_are_warned_of(running: fv.Task) -> None:
    found = fv.audit(
        running,
        "gaussian-noise:sigma=30",
        attack="token-span",
        federation=FederationSettings(rounds=1, batch_size=8),
        settings=fv.AuditSettings(victims=1, candidates=4, link=False),
    ).result
    said = " ".join(each.words for each in found.verdict.warnings)
    assert "perplexity rises by more than 5 % of that without a defense" in said
    assert "no better than what guessing by how frequent each token is would give" in said


def test_compare_takes_less_perplexity_for_better(running: fv.Task) -> None:
    found = fv.compare(
        running,
        ["clip:norm=0.001", "clip:norm=100"],
        attack="token-span",
        federation=FederationSettings(rounds=2, batch_size=4, lr=0.5),
        settings=fv.AuditSettings(victims=1, candidates=4, link=False),
    ).comparison
    assert found.utility == "perplexity"
    strict, loose = found.points
    assert loose.utility.mean < strict.utility.mean
    assert best_within(found, "reconstruct", 0.01) is loose


def test_classes_of_sentences_are_judged_by_matthews_correlation_too(tmp_path: Path) -> None:
    task = text_task(tmp_path)
    found = Evaluator(task).utility(weights(task), {})
    inputs, right = task.test.batch(list(range(len(task.test))))
    assert isinstance(inputs, dict)
    named = task.model(**inputs).argmax(1)
    both = torch.stack([named, right]).double()
    spread = both.std(1).prod()
    by_hand = float(torch.corrcoef(both)[0, 1]) if spread > 0 else 0.0
    assert found.metric == "accuracy"
    assert found.others["MCC"] == pytest.approx(by_hand, abs=1e-9)
