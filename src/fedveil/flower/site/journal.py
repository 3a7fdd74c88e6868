"""What a site keeps for itself: a log of all that left it, and what it has spent, over all runs."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import replace
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

SITE = 0  # whoever of the site's nodes sent it, under whatever partition: it is one budget


class Journal:
    """The log and the spendings of a site. Both are written before anything leaves."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        try:
            private_folder(policy.state)
        except FedveilError as error:
            raise FedveilError(f"state: {str(error).partition(';')[0]}") from None
        try:
            policy.log.parent.mkdir(parents=True, exist_ok=True)
            with policy.log.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise FedveilError(f"cannot write the log {policy.log}: {one_line(error)}") from None
        if not any(policy.state.glob("spent-*.json")) and _tells_of_updates(policy.log):
            raise FedveilError(
                f"{policy.log} tells of updates that have left, and {policy.state} does not know what they spent: "
                "restore that folder; if the budget is to begin anew, begin a new log too"
            )

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
        path, chain = policy.state / f"spent-{form_of(weights)[:16]}.json", policy.rules.chain
        with (policy.state / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another node of the site must not count from the same number
            if path.exists():
                ledger.load_state_dict(_read(path), known=[chain])
            ledger.spend(SITE, Release(chain))
            others = [_read(other) for other in sorted(policy.state.glob("spent-*.json")) if other != path]
            count = ledger.count(SITE) + sum(line["times"] for told in others for line in told["spent"])
            if policy.updates is not None and count > policy.updates:
                raise FedveilError(f"the site's policy allows {policy.updates} updates, and they have left")
            delta = policy.delta / (1 + len(others))  # budgets of different models add up, ε and δ
            spent = ledger.statement(delta).epsilon
            if policy.epsilon is not None:
                every = [spent, *(self._epsilon(told, delta) for told in others)]
                if None in every:
                    raise FedveilError(
                        "updates have left under a defense whose guarantee does not add up with this one's, so the "
                        "site's privacy budget cannot be kept"
                    )
                spent = sum(each for each in every if each is not None)
                if spent > policy.epsilon:
                    raise FedveilError("the site's privacy budget does not allow another update")
            write_atomically(path, json.dumps(ledger.state_dict(), indent=1).encode())
        return spent

    def _epsilon(self, told: Mapping[str, Any], delta: float) -> float | None:
        """What updates of another model have spent; None where no guarantee says it."""
        exposure = exposure_of({}, seeded=False, bare_buffers=False)
        ledger = Ledger(replace(exposure, parameters=told["parameters"]))
        ledger.load_state_dict(told, known=[self._policy.rules.chain])
        return ledger.statement(delta).epsilon


def _read(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {**told, "spent": [{**line, "client": SITE} for line in told["spent"]]}
    except (OSError, ValueError, TypeError, KeyError):
        raise FedveilError("what the site has spent cannot be read: nothing leaves until it can") from None


def _tells_of_updates(log: Path) -> bool:
    """Whether a log has a line of an update that left."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        return any('"sent": true' in line and '"type": "train' in line for line in lines)
