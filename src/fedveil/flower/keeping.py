"""What the server keeps: a checkpoint after every round, the ledger, and a line of JSON for every round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedveil.clients.engine import Tensors
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.checkpoint import differences
from fedveil.files import write_atomically
from fedveil.ledger.ledger import Ledger
from fedveil.tensorfile import Header, grouped, prefixed, read_tensors, write_tensors

FORMAT, VERSION = "fedveil-flower-checkpoint", 1
CHECKPOINT, LEDGER, ROUNDS = "checkpoint.safetensors", "ledger.json", "rounds.jsonl"


class RoundLine(BaseModel):
    """One line of rounds.jsonl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    round: int
    asked: list[int]
    taken: list[int]
    refused: dict[int, str] = {}  # an update came and was not taken
    failed: dict[int, str] = {}  # a client sent an error in place of an update
    lost: dict[int, str] = {}  # nothing came
    changed: bool = True  # whether the model moved
    seconds: float
    bytes_up: int
    examples: dict[int, int] = {}  # of the clients that told how many they have
    metrics: dict[str, float] = {}  # of the clients, in the mean
    evaluation: dict[str, float] = {}  # of the server's own


class _Checkpoint(Header):
    configuration: dict[str, Any]
    history: list[RoundLine]


@dataclass
class Progress:
    """How far a run has come."""

    arrays: Tensors
    velocity: Tensors = field(default_factory=dict)
    history: list[RoundLine] = field(default_factory=list)


class Keeper:
    """The folder of a run; without one, nothing is kept."""

    def __init__(self, folder: Path | None, configuration: Mapping[str, Any]) -> None:
        self.folder = folder
        self._configuration = json.loads(json.dumps(configuration, default=str))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def load(self, ledger: Ledger, chain: Chain) -> Progress | None:
        """Go on where a run stopped, if there is something; the ledger is never forgotten."""
        if self.folder is None:
            return None
        path = self.folder / CHECKPOINT
        if path.exists() and not (self.folder / LEDGER).exists():
            raise FedveilError(
                f"{path} has no {LEDGER} beside it: nobody knows what was spent before; restore it, or choose another "
                "folder"
            )
        self._load_ledger(ledger, chain)
        if not path.exists():
            return None
        header, tensors = read_tensors(path, _Checkpoint, FORMAT, VERSION)
        changed = differences(header.configuration, self._configuration)
        if changed:
            raise FedveilError(f"{path} belongs to another run: {'; '.join(changed)}. Choose another folder")
        groups = grouped(tensors)
        progress = Progress(groups.get("arrays", {}), groups.get("velocity", {}), list(header.history))
        self._write_rounds(progress.history)
        return progress

    def _load_ledger(self, ledger: Ledger, chain: Chain) -> None:
        assert self.folder is not None
        try:
            told = json.loads((self.folder / LEDGER).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, ValueError):
            raise FedveilError(
                f"{self.folder / LEDGER} cannot be read: without it nobody knows what was spent; restore it, or choose "
                "another folder"
            ) from None
        ledger.load_state_dict(told, known=[chain])

    def save_ledger(self, ledger: Ledger) -> None:
        """Before messages go out: after a crash, what may have been sent counts as sent."""
        if self.folder is not None:
            write_atomically(self.folder / LEDGER, json.dumps(ledger.state_dict(), indent=1).encode())

    def save(self, progress: Progress) -> None:
        """Keep a round."""
        if self.folder is None:
            return
        header = _Checkpoint(
            format=FORMAT, version=VERSION, configuration=self._configuration, history=progress.history
        )
        tensors = prefixed("arrays", progress.arrays) | prefixed("velocity", progress.velocity)
        write_tensors(self.folder / CHECKPOINT, header, tensors)
        with (self.folder / ROUNDS).open("a", encoding="utf-8") as file:
            file.write(progress.history[-1].model_dump_json() + "\n")

    def start(self) -> None:
        """Begin a new run in the folder."""
        if self.folder is not None:
            self._write_rounds([])

    def _write_rounds(self, history: list[RoundLine]) -> None:
        assert self.folder is not None
        lines = "".join(line.model_dump_json() + "\n" for line in history)
        write_atomically(self.folder / ROUNDS, lines.encode())
