"""What is needed to do an audit again."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fedveil.auditing.result import Provenance

_NAMED = ("fedveil", "torch", "numpy", "scipy", "scikit-learn", "safetensors")


def provenance(
    *, command: str, config: dict[str, Any], seed: int, hashes: dict[str, str], started: str, seconds: float
) -> Provenance:
    """The record of a run: its configuration, the versions it ran on, and the kind of machine (not its name)."""
    return Provenance(
        command=command,
        config=config,
        seed=seed,
        versions={"python": platform.python_version(), **{name: _version(name) for name in _NAMED}},
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        hashes=hashes,
        started=started,
        seconds=seconds,
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
