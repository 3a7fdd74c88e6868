"""`python -m benchmarks [NAME ...]`: measure, write RESULTS.md and results.json. Without a name, all of PARTS."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from filelock import FileLock

from benchmarks import (
    attack,
    attackers,
    beside_breaching,
    borders,
    calibration,
    costs,
    deployment,
    every_attack,
    every_defense,
    fedavg,
    fedavg_attacks,
    flower_mod,
    gradients,
    growth,
    guard,
    high_resolution,
    lamp,
    membership,
    profiles,
    records,
    text,
    utility,
    whole_jobs,
)
from benchmarks.tables import RESULTS, Table
from fedveil.memory import keep_freed_memory

HERE = Path(__file__).parent
# A long part yields its tables again and again as they grow: what was measured is kept, whatever ends it.
PARTS: dict[str, Callable[[], list[Table] | Iterable[list[Table]]]] = {
    "gradients": gradients.measure,
    "flower-mod": flower_mod.measure,
    "attack": attack.measure,
    "breaching": beside_breaching.lenet,
    "breaching-resnet18": beside_breaching.resnet18,
    "fedavg": fedavg.measure,
    "growth": growth.measure,
    "profiles": profiles.measure,
    "calibration": calibration.measure,
    "attackers": attackers.measure,
    "every-defense": every_defense.measure,
    "every-attack": every_attack.measure,
    "high-resolution": high_resolution.measure,
    "borders": borders.measure,
    "fedavg-attacks": fedavg_attacks.measure,
    "membership": membership.measure,
    "costs": costs.measure,
    "records": records.measure,
    "text": text.measure,
    "lamp": lamp.measure,
    "guard": guard.measure,
    "utility": utility.measure,
    "fedavg-as-it-comes": whole_jobs.fedavg_as_it_comes,
    "deployment": deployment.measure,
    "verdicts": whole_jobs.verdicts,
    "memory": whole_jobs.memory,
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    keep_freed_memory()  # as the command line does
    for name in names or list(PARTS):
        print(f"== {name}", flush=True)
        tables: list[Table] = []
        for tables in growing(PARTS[name]()):
            keep(name, tables)
        for table in tables:
            print(table.markdown(), flush=True)
    return 0


def growing(measured: list[Table] | Iterable[list[Table]]) -> Iterable[list[Table]]:
    """The tables of a part, each time they have grown; nothing where the part was left out."""
    if isinstance(measured, list):
        return [measured] if measured else []
    return measured


def keep(name: str, tables: list[Table]) -> None:
    """Put a part's tables in the place of its old ones; the other parts stay as they are."""
    with FileLock(HERE / ".results.lock"):  # two parts may be measured at once
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tables": [table.plain() for table in tables],
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "RESULTS.md").write_text(page(results))


def page(results: dict[str, dict[str, object]]) -> str:
    lines = [
        "# Measured",
        "",
        "Written by `make bench`. Times of one run on one machine: only the ratios carry over to another.",
    ]
    for part in (part for name in PARTS if (part := results.get(name))):
        lines += ["", f"torch {part['torch']}, Python {part['python']}."]
        for table in part["tables"]:  # type: ignore[attr-defined]
            lines += ["", Table.of(table).markdown()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
