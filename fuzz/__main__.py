"""`python -m fuzz [READER ...] [--files N] [--seed N]`: read mutated files, print a table; 1 if anything failed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# The workers are forks of this process, and threads of torch would not survive a fork: use one thread.
os.environ["OMP_NUM_THREADS"] = "1"

from fuzz.campaign import Tally, campaign
from fuzz.readers import READERS

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", help=f"all, or some of: {', '.join(reader.name for reader in READERS)}")
    parser.add_argument("--files", type=int, default=24_000, help="files in all; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same files; default %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default %(default)s")
    parser.add_argument("--keep", type=Path, default=HERE / "failures", help="folder for files that show a fault")
    given = parser.parse_args(arguments)
    known = {reader.name: reader for reader in READERS}
    unknown = [name for name in given.readers if name not in known]
    if unknown:
        parser.error(f"no such reader: {', '.join(unknown)}; there are: {', '.join(known)}")
    chosen = [known[name] for name in given.readers] or list(READERS)
    start = time.monotonic()
    tallies = campaign(
        chosen, given.files, given.seed, given.keep.resolve(), given.workers, lambda line: print(line, flush=True)
    )
    print(table(tallies))
    failed = any(tally.wrong for tally in tallies.values())
    idle = [name for name, tally in tallies.items() if not tally.counts["accepted"] and not tally.wrong]
    for name in idle:
        print(f"{name}: no file was accepted, so little of the reader was reached")
    print(f"seed {given.seed}, {time.monotonic() - start:.0f} s")
    return 1 if failed or idle else 0


def table(tallies: dict[str, Tally]) -> str:
    """Reader, files, accepted, refused, failures."""
    rows = [["reader", "files", "accepted", "refused", "failures"]]
    total = Tally()
    for name, tally in [*tallies.items(), ("all", total)]:
        counts = tally.counts
        rows.append([name, *(f"{n:,}" for n in (tally.files, counts["accepted"], counts["refused"], tally.wrong))])
        total.counts += counts
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
