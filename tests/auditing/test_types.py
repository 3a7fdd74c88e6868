"""Models of every floating type are trained, attacked and judged."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.auditing.audit_result import LeakageTable


@cache
def audited(dtype: torch.dtype, protocol: str) -> LeakageTable:
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 4))
    model = nn.Sequential(*layers).to(torch.bfloat16).to(dtype)  # whatever the type, the same weights
    outcome = fv.audit(
        fv.Task(model, (torch.rand(120, 1, 8, 8), torch.arange(120) % 4), clients=2),
        "gradient-dropout:keep=0.9",
        fv.attacks.InvertingGradients(steps=40, restarts=1, polish=0),
        federation=fv.FederationSettings(rounds=2, protocol=protocol),  # type: ignore[arg-type]
        settings=fv.AuditSettings(victims=2, candidates=10, rounds=(1, 2), reference="none"),
        progress=False,
    )
    return outcome.leakage


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_an_audit_of_a_model_of_another_type(dtype: torch.dtype, protocol: str) -> None:
    found = audited(dtype, protocol)
    if protocol == "fedavg" and dtype != torch.float64:
        # Rounded weights hide much of their change, not all of it.
        assert found["ceiling", "psnr"].mean > found["noise-floor", "psnr"].mean + 1
        return
    single = audited(torch.float32, protocol)
    assert found["ceiling", "psnr"].mean == pytest.approx(single["ceiling", "psnr"].mean, abs=1.5)
    # Who tells the kept entries apart comes near to exact, as near as the type's own rounding lets.
    assert min(each["adaptive", "psnr"].mean for each in (found, single)) > single["ceiling", "psnr"].mean + 10
