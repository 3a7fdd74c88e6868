"""Numbers to predict: floating targets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedveil.errors import FedveilError
from fedveil.tasks.regression import squared_error
from fedveil.tasks.task import Task, client_labels

X = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randn(30, generator=torch.Generator().manual_seed(1))
PAIRS = torch.randn(30, 2, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("targets, outputs", [(Y, 1), (Y[:, None], 1), (PAIRS.double(), 2)])
def test_floating_targets_are_numbers(targets: torch.Tensor, outputs: int) -> None:
    made = Task(nn.Linear(5, outputs), (X, targets), clients=3)
    assert made.loss is squared_error
    assert (made.classes, made.labels, made.label_names) == (None, None, ())
    assert made.target.kind == made.train.subset([0, 1]).target.kind == "numbers"
    assert made.train.batch([3])[1].shape == (1, *targets.shape[1:])
    assert client_labels(made).counts == [[], [], []]


def test_items_of_a_data_set_may_be_numbers() -> None:
    items = [(X[place], float(Y[place])) for place in range(30)]
    made = Task(nn.Linear(5, 1), _Items(items))
    assert made.target.kind == "numbers"


class _Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, items: list[tuple[torch.Tensor, float]]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, float]:
        return self._items[place]


def test_the_usual_loss_never_compares_each_with_each() -> None:
    output, targets = torch.randn(4, 1), torch.randn(4)
    assert squared_error(output, targets) == functional.mse_loss(output[:, 0], targets)
    with pytest.raises(FedveilError, match=r"compare each prediction with each target"):
        Task(nn.Linear(5, 1), (X, Y), loss=functional.mse_loss)
    assert Task(nn.Linear(5, 1), (X, Y[:, None]), loss=functional.mse_loss).classes is None


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"partition": "dirichlet:alpha=1"}, "the targets here are numbers: use iid"),
        ({"partition": "shards"}, "the targets here are numbers: use iid"),
        ({"class_names": ["low", "high"]}, "no classes: leave class_names out"),
    ],
)
def test_what_needs_classes_is_refused(settings: dict[str, object], line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        Task(nn.Linear(5, 1), (X, Y), **settings)  # type: ignore[arg-type]


def test_a_limit_spreads_over_the_numbers() -> None:
    made = Task(nn.Linear(5, 1), ((X, Y), (X, Y)), limit=10)
    assert len(made.train) == 10
