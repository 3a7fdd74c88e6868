"""Small experiments that take a second or two."""

from __future__ import annotations

from typing import Any

from fedveil import Experiment

ATTACK = "inverting-gradients:steps=4,restarts=1,polish=0"


def small(**changes: Any) -> Experiment:
    """Digits on a small network, one short attack."""
    given: dict[str, Any] = {
        "task": {"data": "digits", "model": "mlp:hidden=[8]", "limit": 60, "clients": 2},
        "federation": {"rounds": 1},
        "audit": {"victims": 3, "candidates": 5, "reference": "none"},
        "attack": [ATTACK],
    }
    return Experiment(**given | changes)
