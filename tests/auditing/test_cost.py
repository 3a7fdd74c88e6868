"""What a defense costs: time with its noise, accuracy beside what needs no model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.auditing.cost import measure_cost
from fedveil.federation.history import RoundRecord, Utility


def task() -> fv.Task:
    labels = torch.tensor([0] * 80 + [1] * 20)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    return fv.Task(model=model, data=(torch.rand(100, 1, 2, 2), labels), clients=2, split="50/0/50")


def run(seconds: list[float]) -> Any:
    history = [
        RoundRecord(
            round=i + 1, utility=Utility(test=0.8), train_loss=1, seconds=s, bytes_up=1, bytes_down=1, clients=[0]
        )
        for i, s in enumerate(seconds)
    ]
    correct = torch.ones(50, dtype=torch.bool)
    return SimpleNamespace(history=history, utility=Utility(test=0.8), untrained=Utility(test=0.5), values=correct)


def test_the_slowdown_has_an_interval_from_the_spread_of_the_rounds() -> None:
    random = np.random.default_rng(0)
    bare = [9.0, *(1 + 0.1 * random.standard_normal(20))]
    same = [9.0, *(1 + 0.1 * random.standard_normal(20))]
    slow = [9.0, *(1.5 + 0.1 * random.standard_normal(20))]
    found = measure_cost(task(), run(bare), run(same)).slowdown_interval
    assert found is not None
    assert found.low < 1 < found.high < 1.2  # the first round, which sets up, is left out
    found = measure_cost(task(), run(bare), run(slow)).slowdown_interval
    assert found is not None
    assert 1.3 < found.low < found.mean < found.high < 1.7


def test_the_first_round_pays_for_set_up_and_is_left_out() -> None:
    found = measure_cost(task(), run([9.0, 1.0, 2.0]), run([30.0, 3.0, 4.0]))
    assert found.seconds_per_round == {"undefended": 1.5, "defended": 3.5}
    assert found.slowdown == pytest.approx(3.5 / 1.5)
    assert measure_cost(task(), run([9.0]), None).seconds_per_round == {"undefended": 9.0}  # there is no other


def test_few_rounds_have_no_spread() -> None:
    found = measure_cost(task(), run([1.0, 1.0]), run([1.0, 2.0]))
    assert found.slowdown == 2.0
    assert found.slowdown_interval is None


def test_what_an_answer_without_a_model_would_get() -> None:
    made = task()
    found = measure_cost(made, run([1.0]), None)
    assert found.chance == 0.5
    assert found.majority == pytest.approx(float((made.test.labels == 0).float().mean()))
    assert found.slowdown_interval is None
