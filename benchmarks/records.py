"""What attackers get of rows of a table: breast cancer (from scikit-learn) on an untrained `mlp`."""

from __future__ import annotations

from collections.abc import Iterator

import fedveil as fv
from benchmarks.tables import STORE, Table
from fedveil.auditing.result import Estimate

CASES = [(None, 1, 16), (None, 8, 8), ("gradient-dropout", 1, 16), ("gaussian-noise:sigma=0.01", 1, 16)]
ATTACKS = ["analytic", "inverting-gradients:steps=200"]
ROLES = ("ceiling", "naive", "adaptive")


def measure() -> Iterator[list[Table]]:
    table = Table(
        "Rows of a table",
        ["defense", "batch", "updates", "attack", "attacker", "cells recovered", "whole rows", "identified"],
        "breast-cancer, 30 numbers, mlp before training. A cell counts within a tenth of its column's deviation. "
        "Shares in percent with 95 % intervals.",
    )
    for defense, batch, victims in CASES:
        task = fv.task("breast-cancer", model="mlp", clients=4)
        settings = fv.AuditSettings(victims=victims, batch_size=batch, link=False)
        found = fv.audit(task, defense, ATTACKS, settings=settings, train=False, store=STORE)
        for attack in ATTACKS:
            for role in ROLES:
                row = found.result.row(role, attack.partition(":")[0])
                if row is not None and (role != "ceiling" or defense is None):
                    shares = [_share(row.metrics[name]) for name in ("cells", "whole_rows", "identified")]
                    table.add(defense or "none", batch, victims, row.attack, role, *shares)
        yield [table]


def _share(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.1f} [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]"
