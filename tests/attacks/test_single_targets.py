"""Several labels and numbers are read off the update of a single example."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedveil.attacks.labels import read_label, recover_labels
from fedveil.attacks.problem import Problem
from fedveil.attacks.single_targets import single_targets
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.examples import TargetForm
from fedveil.tasks.regression import squared_error
from fedveil.tree import Tree

LABELS = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
NUMBERS = torch.tensor([0.3, -2.0, 14.0, 0.0])


def problem(targets: torch.Tensor, loss: Any, kind: str, *, bias: bool = True) -> Problem:
    """Updates of one random input each."""
    torch.manual_seed(3)
    outputs = targets[0].numel()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs, bias=bias))
    rows = []
    for target in targets:
        found = torch.autograd.grad(loss(model(torch.randn(1, 6)), target[None]), list(model.parameters()))
        rows.append(dict(zip(dict(model.named_parameters()), found, strict=True)))
    aim = Tree.stack(rows)
    return Problem(
        model=model,
        loss=loss,
        params=Tree.expand({name: p.detach() for name, p in model.named_parameters()}, len(targets)),
        buffers=Tree({}),
        target=aim,
        weight=aim.map(torch.ones_like),
        shape=(6,),
        batch_size=1,
        streams=Streams.seeded(0, range(len(targets)), "t"),
        form=TargetForm(kind, tuple(targets.shape[1:])),  # type: ignore[arg-type]
    )


def test_labels_are_read_off_exactly() -> None:
    made = problem(LABELS, functional.binary_cross_entropy_with_logits, "labels")
    assert recover_labels(made).equal(LABELS[:, None])
    assert read_label(made).equal(LABELS[:, None])


@pytest.mark.parametrize("targets", [NUMBERS, NUMBERS[:, None], torch.stack([NUMBERS, 1 - NUMBERS], 1)])
def test_numbers_are_read_off_to_rounding(targets: torch.Tensor) -> None:
    found = recover_labels(problem(targets, squared_error, "numbers"))
    assert found.shape == (4, 1, *targets.shape[1:])
    torch.testing.assert_close(found[:, 0], targets, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "made, line",
    [
        (replace(problem(NUMBERS, squared_error, "numbers"), batch_size=2), "not who has which: use a batch of 1"),
        (problem(NUMBERS[:, None], squared_error, "numbers", bias=False), "last linear layer with a bias"),
        (problem(NUMBERS[:, None], functional.l1_loss, "numbers"), "does not follow from them in a line"),
        (problem(NUMBERS[:, None], functional.huber_loss, "numbers"), "does not follow from them in a line"),
    ],
)
def test_what_tells_no_targets_is_refused(made: Problem, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        single_targets(made)
