"""What a run may leave outside of its folder: processes, temporary files, shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 600.0  # seconds within which the processes of a killed run must end, even on a busy machine
MOMENT = 20.0  # seconds within which another program uses or removes shared memory that it made
SHARED = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Names of shared memory on this machine."""
    return {path.name for path in SHARED.iterdir()} if SHARED.exists() else set()


def traces(group: int, temporary: Path, before: set[str]) -> list[str]:
    """What is left of a run that has ended: `group` is its process group, `before` the shared memory at its start."""
    if not _ended(group):
        return [f"processes of group {group} still run"]
    found = [f"temporary file {path.name}" for path in temporary.iterdir()]
    return found + [f"shared memory {name}" for name in sorted(_unused(before))]


def _unused(before: set[str]) -> set[str]:
    """New shared memory that no process uses. Wait a moment, since other programs may be about to remove theirs."""
    found = {name for name in shared_memory() - before if not _used(name)}
    end = time.monotonic() + MOMENT
    while found and time.monotonic() < end:
        time.sleep(0.1)
        found = {name for name in found if not _used(name)}
    return found


def _ended(group: int) -> bool:
    end = time.monotonic() + PATIENCE
    while _runs(group):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # Zombies count as ended.
    states = [line.rpartition(")")[2].split() for line in _stats()]
    return not states or any(int(state[2]) == group and state[0] not in "ZX" for state in states)


def _stats() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield path.read_text()
        except OSError:
            continue  # it has just ended


def _used(name: str) -> bool:
    """Whether this shared memory is another program's: a living process has it open or is named in its name."""
    if any(part.isdecimal() and Path("/proc", part).exists() for part in name.split("-")):
        return True
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"{SHARED / name}\n" in path.read_text():
                return True
        except OSError:
            continue
    return not (SHARED / name).exists()
