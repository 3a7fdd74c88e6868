"""Captured updates of text: attacked with the task that they come from, in Python and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedveil as fv
from attacks.texts import running_task, sentence_file, text_task
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture
from fedveil.tasks.text_form import tokens_of
from journeys.console import fedveil, refused

__all__ = ["fedveil"]

SETTINGS = fv.AuditSettings(candidates=8)


def captured(task: fv.Task, rows: list[int]) -> tuple[list[Capture], list[Any]]:
    """Gradients of a loop of one's own, and the tokens and targets behind them."""
    captures, truths = [], []
    for row in rows:
        inputs, targets = task.train.batch([row])
        assert isinstance(inputs, dict)
        task.model.zero_grad()
        task.loss(task.model(**inputs), targets).backward()
        gradient = {name: p.grad for name, p in task.model.named_parameters() if p.grad is not None}
        captures.append(fv.capture(task.model, gradient, batch_sizes=1))
        truths.append((tokens_of(inputs), targets))
    return captures, truths


def test_sentences_behind_captures_come_back_and_are_linked(tmp_path: Path) -> None:
    task = text_task(tmp_path)
    captures, truths = captured(task, [0, 1, 2])
    found = fv.attack(captures, ["token-rows", "token-span", "link"], truth=truths, data=task, settings=SETTINGS)
    for attack in ("token-rows", "token-span"):
        row = found.result.row("naive", attack)
        assert row is not None
        assert row.metrics["whole_sentences"].mean == 1
        assert row.metrics["identified"].mean == 1
    linked = next(each for each in found.result.rows if each.question == "link" and each.role == "naive")
    assert linked.metrics["linked"].mean == 1
    assert '<mark class="right">' in found.report(tmp_path / "report.html").read_text(encoding="utf-8")


def test_without_a_truth_the_sentences_themselves_are_found(tmp_path: Path) -> None:
    task = text_task(tmp_path)
    captures, truths = captured(task, [4])
    found = fv.attack(captures, "token-rows", data=task, settings=SETTINGS)
    assert torch.equal(found.findings["token-rows"]["naive"].inputs[0], truths[0][0])


def test_running_text_is_captured_too(tmp_path: Path) -> None:
    task = running_task(tmp_path)
    captures, truths = captured(task, [0])
    found = fv.attack(captures, "token-span", truth=truths, data=task, settings=SETTINGS)
    row = found.result.row("naive", "token-span")
    assert row is not None
    assert row.metrics["tokens_found"].mean > 0.8


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    task = text_task(tmp_path)
    captures, truths = captured(task, [0])
    tokens, label = truths[0]
    for wrong, said in (
        ((tokens[:, :5], label), "a truth holds sentences of 5 places, the task's have 16"),
        ((tokens + 1000, label), "tokens that are not among the"),
        ((tokens.repeat(2, 1), label.repeat(2)), "a truth holds 2 examples, its capture is of 1"),
    ):
        with pytest.raises(FedveilError, match=said):
            fv.attack(captures, "token-rows", truth=wrong, data=task, settings=SETTINGS)
    with pytest.raises(FedveilError, match="ci-net attacks pictures, not sentences"):
        fv.attack(captures, "ci-net", truth=truths, data=task, settings=SETTINGS)


def test_captures_of_a_run_are_attacked_from_the_command_line(fedveil: Any, tmp_path: Path) -> None:
    data = f"sentences:path={sentence_file(tmp_path)},length=16,vocabulary=300"
    run = ("--data", data, "--model", "tiny-transformer:width=48", "--clients", "2")
    made = fedveil(
        "train", *run, "--rounds", "1", "--batch-size", "1", "--record-rounds", "1", "--out", tmp_path / "run"
    )
    assert made.code == 0, made.err
    folders = (tmp_path / "run/captures", "--truths", tmp_path / "run/truths")
    said = fedveil(
        *("attack", *folders, "--data", data, "--attack", "token-rows"),
        *("--defense", "none", "--out", tmp_path / "out"),
    )
    assert said.code == 0, said.err
    assert "sentence" in said.out
    sides = [sorted((tmp_path / "out").rglob(f"{name}.txt")) for name in ("original", "naive")]
    assert len(sides[0]) == 2
    assert [path.read_text() for path in sides[0]] == [path.read_text() for path in sides[1]]
    refused(
        fedveil("attack", *folders, "--data", data, "--model", "mlp", "--out", tmp_path / "other"),
        "is text, which mlp does not take",
    )
