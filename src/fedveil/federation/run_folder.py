"""The folder of a run: its checkpoint and its captures."""

from __future__ import annotations

from pathlib import Path

import torch

from fedveil.federation.capture import Captured
from fedveil.federation.checkpoint import RunState, configuration, load_checkpoint, save_checkpoint
from fedveil.federation.history import RoundRecord
from fedveil.federation.plan import Plan


class RunFolder:
    """Where a run is kept, round by round."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self._plan = plan
        self._described = configuration(plan)

    @property
    def checkpoint(self) -> Path:
        """The file of the checkpoint."""
        return self.folder / "checkpoint.safetensors"

    def load(self, device: torch.device) -> RunState | None:
        """How far the run has come, or None if there is no checkpoint yet."""
        if not self.checkpoint.exists():
            return None
        state = load_checkpoint(self.checkpoint, self._plan.chain, self._described)
        state.to(device)
        return state

    def save(self, state: RunState, fresh: list[Captured]) -> list[Captured]:
        """Keep a round; returns its captures as they lie in their files, so that they take no memory.

        Captures go first: once the checkpoint tells of the round they are all there.
        """
        stored = [captured.saved(*self._paths(captured.round, captured.client)) for captured in fresh]
        save_checkpoint(self.checkpoint, state, self._plan.chain, self._described)
        return stored

    def captured(self, history: list[RoundRecord]) -> list[Captured]:
        """What was captured in the rounds before a resume."""
        found = []
        for record in history:
            for client in sorted(self._plan.recorded(record.round, record.clients)):
                paths = self._paths(record.round, client)
                if client in record.refused and not paths[0].exists():
                    continue  # nothing of it was taken, so nothing was captured
                stored = Captured.stored(client, record.round, *paths)
                _ = stored.capture, stored.truth  # a missing or damaged file is told before training goes on
                found.append(stored)
        return found

    def clear(self) -> None:
        """Remove what an earlier run left, so that nothing of it is taken for this one's."""
        self.checkpoint.unlink(missing_ok=True)
        for kind in ("captures", "truths"):
            for path in (self.folder / kind).glob("round-*-client-*.safetensors"):
                path.unlink()

    def _paths(self, number: int, client: int) -> tuple[Path, Path]:
        """Where a client's captured update of a round lies, and the truth behind it."""
        name = f"round-{number:04}-client-{client:04}.safetensors"
        for kind in ("captures", "truths"):
            (self.folder / kind).mkdir(exist_ok=True)
        return self.folder / "captures" / name, self.folder / "truths" / name
