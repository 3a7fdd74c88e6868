"""How fast this machine is: for forecasts alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from fedveil.clients import choose
from fedveil.clients.engine import Engine


def test_the_pace_is_what_a_gradient_takes_over_what_it_should(monkeypatch) -> None:
    model = nn.Linear(256, 10)
    sample = torch.zeros(8, 256), torch.zeros(8, dtype=torch.int64)
    engine = Engine(model, functional.cross_entropy, backend="loop")
    usual = choose.pace(engine, sample)
    assert 0.01 < usual < 100
    # The first call is not counted, nor a single slow one.
    gradient, calls = Engine.gradient, []

    def slow_at_first(self: Engine, *step: object) -> object:
        calls.append(1)
        if len(calls) in (1, 3):
            sum(range(10**6))
        return gradient(self, *step)

    monkeypatch.setattr(Engine, "gradient", slow_at_first)
    counted = choose.gradient_seconds(model, sample, 1)
    assert choose.pace(engine, sample) * counted < 0.01
    assert len(calls) > 2
