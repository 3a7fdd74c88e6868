"""Tasks with several labels per example are judged by the area under the ROC curve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import fedveil as fv


def task() -> fv.Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(200, 1, 4, 4, generator=generator)
    flat = images.flatten(1)
    labels = torch.stack([flat[:, 0] > 0.5, flat[:, 1] + flat[:, 2] > 1.0, flat[:, 3] > 0.8], 1).float()
    torch.manual_seed(0)
    return fv.Task(model=nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), data=(images, labels), clients=2)


def test_auroc_is_the_utility_and_grows() -> None:
    made = task()
    run = fv.federate(made, None, fv.FederationSettings(rounds=10, lr=1.0, patience=9), backend="stacked")
    assert run.utility.metric == "AUROC"
    assert run.values is not None
    assert float(run.values.mean()) == pytest.approx(run.utility.test)
    assert run.utility.test is not None
    assert run.untrained.test is not None
    assert run.utility.test > max(run.untrained.test, 0.8)
    inputs, targets = made.test.batch(range(len(made.test)))
    scores = torch.func.functional_call(made.model, run.params, (inputs,))
    expected = np.mean([roc_auc_score(targets[:, i], scores[:, i].detach()) for i in range(3)])
    assert run.utility.test == pytest.approx(expected)
    right = (scores > 0) == (targets > 0.5)
    assert run.utility.others == {"accuracy": pytest.approx(float(right.double().mean()))}
