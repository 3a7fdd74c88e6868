"""Examples with any number of labels: rows of zeros and ones as targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional

from fedveil.errors import FedveilError
from fedveil.tasks.auroc import auroc, auroc_by_example
from fedveil.tasks.task import Task, label_table

X = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
Y = (torch.rand(30, 4, generator=torch.Generator().manual_seed(1)) > 0.6).float()


def test_rows_of_zeros_and_ones_are_targets() -> None:
    made = Task(nn.Linear(5, 4), ((X, Y.double()), (X, Y)), clients=3)
    assert (made.classes, made.labels) == (None, 4)
    assert made.loss is functional.binary_cross_entropy_with_logits
    assert made.train.batch([3])[1].equal(Y[3:4])
    assert torch.tensor(label_table(made)).sum(0).tolist() == Y.sum(0).tolist()
    assert Task(nn.Linear(5, 3), (X, torch.arange(30) % 3)).labels is None


@pytest.mark.parametrize(
    "outputs, train, test, line",
    [
        (4, Y.long() * 2, Y, "must be 0 or 1"),
        (4, Y / 0, Y, "NaN or infinity"),
        (4, Y * 2, Y, "differ in what their targets are: numbers, rows of zeros and ones"),
        (3, Y, Y, r"gives \(2, 3\) for a batch of 2, expected \(2, 4\): one score per label"),
        (4, Y, Y[:, :3], "differ in the number of labels"),
        (4, Y, torch.arange(30) % 4, "differ in the number of labels"),
    ],
)
def test_targets_that_do_not_fit_get_one_line(outputs: int, train: torch.Tensor, test: torch.Tensor, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        Task(nn.Linear(5, outputs), ((X, train), (X, test)))


def test_auroc_is_that_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    scores = random.normal(size=(200, 3)).round(1)  # with ties
    targets = (random.random((200, 3)) < [0.5, 0.1, 0.9]).astype(np.float32)
    found = auroc(torch.from_numpy(scores), torch.from_numpy(targets))
    assert found == pytest.approx(roc_auc_score(targets, scores, average="macro"), abs=1e-12)


def test_values_by_example_give_the_auroc_and_its_spread() -> None:
    random = np.random.default_rng(1)
    targets = (random.random((300, 3)) < 0.3).astype(np.float32)
    scores = random.normal(size=(300, 3)) + 0.7 * targets
    values = auroc_by_example(torch.from_numpy(scores), torch.from_numpy(targets))
    assert values is not None
    assert float(values.mean()) == pytest.approx(roc_auc_score(targets, scores), abs=1e-12)
    drawn = [random.integers(0, 300, 300) for _ in range(400)]
    bootstrapped = np.std([roc_auc_score(targets[rows], scores[rows]) for rows in drawn])
    assert float(values.std() / 300**0.5) == pytest.approx(bootstrapped, rel=0.15)


def test_auroc_leaves_out_labels_that_tell_nothing() -> None:
    scores = torch.tensor([[0.1, 5.0], [0.9, 1.0]])
    assert auroc(scores, torch.tensor([[0.0, 1.0], [1.0, 1.0]])) == 1.0
    assert auroc(scores, torch.ones(2, 2)) is None
    assert auroc(torch.zeros(4, 1), torch.tensor([[0.0], [1.0], [0.0], [1.0]])) == 0.5
