"""What a site keeps for itself: a log of all that left it, and what it has spent, over all runs."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from fedveil.defenses.guarantee import exposure_of
from fedveil.errors import FedveilError, one_line
from fedveil.files import private_folder, write_atomically
from fedveil.flower.memory import form_of
from fedveil.flower.site.policy import Policy
from fedveil.ledger.ledger import Ledger, Release


class Journal:
    """The log and the spendings of a site. Both are written before anything leaves."""

    def __init__(self, policy: Policy, client: int) -> None:
        self._policy, self._client = policy, client
        private_folder(policy.state)
        try:
            policy.log.parent.mkdir(parents=True, exist_ok=True)
            with policy.log.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise FedveilError(f"cannot write the log {policy.log}: {one_line(error)}") from None

    def write(self, **told: Any) -> None:
        """Add a line to the log."""
        line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **told}
        with self._policy.log.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # several nodes of a site may share the file
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def spend(self, weights: Mapping[str, Tensor]) -> float | None:
        """Count an update that is about to leave; refuse it where that would be too much. Returns ε so far."""
        policy = self._policy
        ledger = Ledger(exposure_of(weights, seeded=False, bare_buffers=policy.buffers == "share"))
        path = policy.state / f"spent-{form_of(weights)[:16]}.json"
        chain = policy.rules.chain
        if path.exists():
            ledger.load_state_dict(_read(path), known=[chain])
        ledger.spend(self._client, Release(chain))
        others = [_read(other) for other in sorted(policy.state.glob("spent-*.json")) if other != path]
        count = ledger.count(self._client) + sum(line["times"] for told in others for line in told["spent"])
        if policy.updates is not None and count > policy.updates:
            raise FedveilError(f"the site's policy allows {policy.updates} updates, and they have left")
        spent = ledger.statement(policy.delta).epsilon
        if policy.epsilon is not None:
            spent = (spent or 0.0) + sum(self._epsilon(told) for told in others)
            if spent > policy.epsilon:
                raise FedveilError("the site's privacy budget does not allow another update")
        write_atomically(path, json.dumps(ledger.state_dict(), indent=1).encode())
        return spent

    def _epsilon(self, told: Mapping[str, Any]) -> float:
        """What updates of another model have spent; budgets of different models add up."""
        exposure = exposure_of({}, seeded=False, bare_buffers=False)
        ledger = Ledger(type(exposure)(**{**vars(exposure), "parameters": told["parameters"]}))
        ledger.load_state_dict(told, known=[self._policy.rules.chain])
        return ledger.statement(self._policy.delta).epsilon or 0.0


def _read(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise FedveilError("what the site has spent cannot be read: nothing leaves until it can") from None
    return told
