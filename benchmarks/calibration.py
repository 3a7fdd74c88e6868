"""What the attack recovers on MNIST test images 0–31, one by one, from an untrained LeNet. Takes a few minutes.

Needs MNIST's files under FEDVEIL_DATA; without them this part is left out, and says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable

import torch

import fedveil as fv
from benchmarks.tables import Table
from fedveil.auditing.audit_result import AuditResult
from fedveil.errors import FedveilError

DEFENSES = [
    "gradient-dropout:keep=0.95",
    "gradient-dropout:keep=0.8",
    "gradient-dropout:keep=0.6",
    "gradient-dropout:keep=0.3",
    "gradient-dropout:keep=0.6,match_spread=true",
    "gaussian-noise:sigma=1/255",
    "gaussian-noise:sigma=16/255",
    "laplace-noise:scale=1/255",
    "clip:norm=1",
]


def measure() -> list[Table]:
    torch.set_num_threads(2)
    try:
        task = fv.task("mnist", model="lenet")
    except FedveilError as error:
        print(f"calibration is left out: {error}")
        return []
    table = Table(
        "Inverting Gradients on MNIST test images 0–31, untrained LeNet, 1600 steps",
        ["defense", "attacker", "PSNR (dB)", "SSIM", "identified among 100"],
        "Mean with its 95 % interval over 32 images.",
    )
    settings = fv.AuditSettings(victims=32, source="test", link=False)
    with tempfile.TemporaryDirectory() as store:  # the undefended attack and its floor are the same for all
        attack = "inverting-gradients"
        audits = ((d, fv.audit(task, d, attack, settings=settings, train=False, store=store)) for d in DEFENSES)
        return [_filled(table, audits)]


def _filled(table: Table, audits: Iterable[tuple[str, AuditResult]]) -> Table:
    shown_common = False
    for defense, found in audits:
        if not shown_common:
            for role in ("ceiling", "noise-floor", "mean-floor"):
                add(table, "none", role, found)
            shown_common = True
        for role in ("naive", "adaptive"):
            add(table, defense, role, found)
        print(defense, found.verdict, flush=True)
    return table


def add(table: Table, defense: str, role: str, found: AuditResult) -> None:
    cells = []
    for metric, factor, digits in (("psnr", 1, 1), ("ssim", 1, 3), ("identified", 100, 0)):
        value = found.leakage[role, metric]
        mean, low, high = (f"{factor * number:.{digits}f}" for number in (value.mean, value.low, value.high))
        cells.append(f"{mean}{' %' if metric == 'identified' else ''} [{low}, {high}]")
    table.add(defense, role, *cells)
