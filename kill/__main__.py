"""`python -m kill [--kills N] [--seed N]`: kill and resume runs, and print a table; exits with 1 if anything failed."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from kill.campaign import STAGES, Tally, campaign
from kill.scenarios import SCENARIOS

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="python -m kill", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same points; default %(default)s")
    parser.add_argument("--keep", type=Path, default=HERE / "failures", help="folder for runs with faults")
    given = parser.parse_args(arguments)
    given.keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=given.keep.resolve()))
    os.environ["FEDVEIL_CACHE"] = str(folder / "cache")
    start = time.monotonic()
    tallies = campaign(SCENARIOS, given.kills, given.seed, folder, lambda line: print(line, flush=True))
    print(table(tallies))
    print(f"seed {given.seed}, {time.monotonic() - start:.0f} s")
    failed = any(tally.faults for tally in tallies.values())
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


def table(tallies: dict[str, Tally]) -> str:
    """Scenario, runs, kills by stage, failures."""
    rows = [["scenario", "runs", "kills", *STAGES, "failures"]]
    total = Tally()
    for name, tally in [*tallies.items(), ("all", total)]:
        numbers = [tally.runs, tally.kills, *(tally.stages[each] for each in STAGES), len(tally.faults)]
        rows.append([name, *map(str, numbers)])
        total.runs += tally.runs
        total.stages += tally.stages
        total.faults += tally.faults
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
