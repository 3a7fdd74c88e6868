"""Waiting for something to happen, however busy the machine is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 600.0  # seconds; only what never happens takes so long


def wait_for(happened: Callable[[], object], failed: Callable[[], object] = lambda: None) -> None:
    """Return when it has happened. Fails when it cannot any more, or did not in ten minutes."""
    end = time.monotonic() + PATIENCE
    while not happened():
        problem = failed()
        assert not problem, problem
        assert time.monotonic() < end, "it did not happen in ten minutes"
        time.sleep(0.01)


def gone(process: int) -> bool:
    """Whether a process has ended; one that only waits for its parent to notice has."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return Path("/proc/self").exists()  # where there is no /proc, it is still there
