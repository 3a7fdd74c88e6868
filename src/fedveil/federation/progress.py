"""The rounds of a run on a meter."""

from __future__ import annotations

from fedveil.federation.history import RoundRecord
from fedveil.federation.observers import Observer, Watch
from fedveil.federation.settings import FederationSettings
from fedveil.progress import Meter
from fedveil.tasks.task import Task


class ProgressBar(Observer):
    """Shows rounds, utility and the time left as a bar, or one line per round, as the meter's style is."""

    def __init__(self, meter: Meter, label: str = "training") -> None:
        self._meter = meter
        self._label = label
        self._rounds = 0

    def on_start(self, task: Task, settings: FederationSettings, done: list[RoundRecord]) -> None:
        self._rounds = settings.rounds
        self._meter.update(len(done), self._rounds)

    def on_round_end(self, record: RoundRecord) -> None:
        utility = record.utility.told
        count = f"round {record.round}/{self._rounds}"
        self._meter.update(record.round, self._rounds, ", ".join(part for part in (count, utility) if part))
        if self._meter.style == "lines":
            told = f"{self._label}: {count}, loss {record.train_loss:.4f}"
            self._meter.say(f"{told}, {utility}" if utility else told)


def watch_with(meter: Meter) -> Watch:
    """Let a meter show a whole audit."""
    return Watch(observers=(ProgressBar(meter),), plan=meter.plan, stage=meter.stage, attack=meter.update)
