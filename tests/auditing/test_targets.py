"""Audits of tasks with several labels per image, and of regression."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import fedveil as fv
from fedveil.auditing.attacking import sorted_rows
from fedveil.auditing.cost import measure_cost
from fedveil.auditing.result import Cost, Estimate
from fedveil.auditing.scoring import _found_labels
from fedveil.auditing.sentences import cost as cost_sentence
from fedveil.auditing.sentences import large_drop
from fedveil.errors import FedveilError
from fedveil.leakage.distractors import choose
from fedveil.report.view import cost_rows

DIGITS = load_digits()
PIXELS = torch.tensor(DIGITS.images, dtype=torch.float32)[:, None] / 16
CLASSES = torch.tensor(DIGITS.target)
LABELS = torch.stack([CLASSES % 2 == 0, CLASSES > 4, CLASSES % 3 == 0], 1).float()
NUMBERS = CLASSES.float() / 9
SETTINGS = fv.AuditSettings(victims=2, rounds=[1, 2], candidates=20, attackers="naive")


def task(targets: torch.Tensor) -> fv.Task:
    torch.manual_seed(0)
    outputs = targets[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, outputs))
    return fv.Task(model, (PIXELS, targets), clients=2, limit=600)


@pytest.mark.parametrize("targets, metric", [(LABELS, "AUROC"), (NUMBERS, "mean squared error")])
def test_a_whole_audit(tmp_path: Path, targets: torch.Tensor, metric: str) -> None:
    found = fv.audit(
        task(targets),
        "gaussian-noise:sigma=0.01",
        ["inverting-gradients:labels=recovered,steps=5,restarts=1", "dlg:steps=3,restarts=1", "analytic"],
        backend="stacked",
        federation=fv.FederationSettings(rounds=2, lr=0.3),
        settings=SETTINGS,
    )
    result = found.result
    read = {run.attack: run.label_recovery for run in result.attacks}
    assert read["analytic"] is not None
    assert read["analytic"].mean == 1.0  # of the undefended updates
    ceiling = result.row("ceiling", "analytic")
    assert ceiling is not None
    assert ceiling.metrics["identified"].mean == 1.0
    assert result.row("ceiling", question="link") is not None
    assert result.cost.metric == metric
    assert result.cost.undefended is not None
    assert result.cost.history[-1].undefended == pytest.approx(result.cost.undefended.mean)
    assert set(result.cost.history[-1].train) == set(result.cost.history[-1].validation) == {"defended", "undefended"}
    assert [row.round for row in result.rows if row.role == "naive" and row.question == "link"] == [None, 1, 2]
    told = {(line["round"], line["part"], line["which"]): line["value"] for line in found.history()}
    assert len(told) == 3 * 3 * 2  # before training and after two rounds
    assert told[2, "train", "undefended"] == result.cost.history[-1].train["undefended"]
    page = found.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"Test {metric}" in page
    assert ("lower is better" in page) == (metric == "mean squared error")


def test_what_thinks_in_classes_is_refused_or_left_out() -> None:
    for attack, line in (("lti", "examples of one class each, and here each has several labels"),):
        with pytest.raises(FedveilError, match=line):
            fv.audit(task(LABELS), attack=attack, train=False, settings=fv.AuditSettings(victims=2))
    with pytest.raises(FedveilError, match=r"cannot read numbers to predict off the update of several"):
        fv.audit(
            task(NUMBERS),
            attack="inverting-gradients:labels=recovered",
            train=False,
            settings=fv.AuditSettings(victims=2, batch_size=2),
        )


def test_a_loss_that_tells_no_targets_is_refused_before_the_work() -> None:
    made = task(NUMBERS[:, None])
    own = fv.Task(made.model, (PIXELS, NUMBERS[:, None]), functional.l1_loss, clients=2, limit=600)
    with pytest.raises(FedveilError, match="does not follow from them in a line"):
        fv.audit(own, attack="inverting-gradients:labels=recovered", settings=fv.AuditSettings(victims=2))


def test_distractors_of_numbers_are_the_nearest() -> None:
    pool = torch.rand(50, 1, 2, 2)
    numbers = torch.linspace(0, 1, 50)
    chosen = choose(torch.rand(1, 1, 2, 2), torch.tensor([0.5]), pool, numbers, count=6)
    assert sorted(chosen[0].tolist()) == [22, 23, 24, 25, 26] or sorted(chosen[0].tolist()) == [23, 24, 25, 26, 27]
    rows = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 1, 1]])
    nearest = choose(torch.rand(1, 1, 2, 2), torch.tensor([[1.0, 1, 0]]), pool[:4], rows, count=4)[0].tolist()
    assert nearest[0] == 0
    assert set(nearest[1:]) == {1, 3}


def test_an_order_that_says_nothing_keeps_rows_together() -> None:
    labels = torch.tensor([[[1.0, 0], [0, 1], [0, 0]]])
    assert sorted_rows(labels).tolist() == [[[0, 0], [0, 1], [1, 0]]]
    assert sorted_rows(torch.tensor([[3, 1, 2]])).tolist() == [[1, 2, 3]]


def test_the_share_of_targets_that_were_found() -> None:
    true = torch.tensor([[[1.0, 0, 1], [0, 0, 0]]])
    assert _found_labels(true.flip(1), true).tolist() == [1.0]
    assert _found_labels(1 - true, true).tolist() == [pytest.approx(2 / 3)]  # in the better order
    numbers = torch.tensor([[0.0], [10.0]])
    assert _found_labels(torch.tensor([[0.1], [9.0]]), numbers).tolist() == [1.0, 0.0]


def test_errors_cost_in_the_other_direction() -> None:
    def estimate(mean: float) -> Estimate:
        return Estimate(mean=mean, low=mean - 0.01, high=mean + 0.01, count=50)

    made = Cost(
        metric="mean squared error",
        rounds=6,
        undefended=estimate(0.2),
        defended=estimate(0.4),
        difference=estimate(0.2),
        majority=1.0,
        others={"R²": {"undefended": 0.8, "defended": 0.6}},
    )
    told = cost_sentence(made)
    assert "test mean squared error (lower is better) 0.2 → 0.4 after 6 rounds (+0.2 [+0.19, +0.21])" in told
    assert "R² 0.8 → 0.6" in told
    assert large_drop(made, 0.05)  # a fifth of the variance
    assert not large_drop(made, 0.2)
    assert not large_drop(made.model_copy(update={"difference": estimate(-0.2)}), 0.05)
    rows = {row[0]: row[1:] for row in cost_rows(made)}
    assert rows["Test mean squared error (lower is better)"][2] == "+0.2 [+0.19, +0.21]"
    assert rows["The same, always answering the mean"][0] == "1"
    assert rows["Test R²"] == ("0.8", "0.6", "–")


def test_always_answering_the_mean_is_what_needs_no_model() -> None:
    made = task(NUMBERS)
    run = fv.federate(made, None, fv.FederationSettings(rounds=1), backend="stacked")
    found = measure_cost(made, run, None)
    assert found.majority == pytest.approx(float(made.test.labels.double().var(correction=0)))
    assert run.utility.others["R²"] == pytest.approx(1 - (run.utility.test or 0) / (found.majority or 1))
    assert np.isfinite(run.utility.others["mean absolute error"])


def test_early_stopping_waits_for_lower_errors() -> None:
    made = task(NUMBERS)
    run = fv.federate(made, None, fv.FederationSettings(rounds=4, lr=0.1, patience=3), backend="stacked")
    errors = [record.utility.validation or 0.0 for record in run.history]
    assert run.chosen_round == errors.index(min(errors)) + 1 > 1
