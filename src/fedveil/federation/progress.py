"""A progress bar on a terminal, or one line per round elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedveil.federation.history import RoundRecord
from fedveil.federation.observers import Observer
from fedveil.federation.settings import Federation
from fedveil.tasks.task import Task


class ProgressBar(Observer):
    """Shows rounds, accuracy and the time left. Where the output is no terminal, `lines` prints one line a round."""

    def __init__(self, label: str = "training", *, console: Console | None = None, lines: bool = True) -> None:
        self._label = label
        self._console = console or Console(stderr=True)
        self._lines = lines
        self._bar: Progress | None = None
        self._id: TaskID | None = None
        self._rounds = 0

    def on_start(self, task: Task, settings: Federation, done: list[RoundRecord]) -> None:
        self._rounds = settings.rounds
        if not self._console.is_terminal:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._id = self._bar.add_task(self._label, total=self._rounds, completed=len(done), accuracy="")
        self._bar.start()

    def on_round_end(self, record: RoundRecord) -> None:
        accuracy = "" if record.utility.test is None else f"{record.utility.metric} {record.utility.test:.1%}"
        if self._bar is not None and self._id is not None:
            self._bar.update(self._id, completed=record.round, accuracy=accuracy)
        elif self._lines:
            told = f"{self._label}: round {record.round}/{self._rounds}, loss {record.train_loss:.4f}"
            self._console.print(f"{told}, {accuracy}" if accuracy else told, highlight=False, soft_wrap=True)

    def on_stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
