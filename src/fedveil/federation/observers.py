"""Observers: hooks that a run calls. Progress bars, logs and trackers live here; the rounds know nothing about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.progress import Report, Stage

if TYPE_CHECKING:
    from fedveil.federation.history import RoundRecord
    from fedveil.federation.run import Run
    from fedveil.federation.settings import FederationSettings
    from fedveil.tasks.task import Task


class Observer:
    """Does nothing at every hook; override those you need. What a hook raises ends the run."""

    def on_start(self, task: Task, settings: FederationSettings, done: list[RoundRecord]) -> None:
        """Before the first round; `done` holds the rounds of an earlier process when a run is resumed."""

    def on_round_start(self, number: int, clients: list[int]) -> None:
        """Before the first step of a round (rounds count from 1) of these clients."""

    def on_step(self, number: int, step: int) -> None:
        """After a step, counted from 0. FedSGD: one exchange. FedAvg: one local step of a chunk of clients."""

    def on_round_end(self, record: RoundRecord) -> None:
        """After a round was evaluated and, if the run has a folder, its checkpoint written."""

    def on_finish(self, run: Run) -> None:
        """After the last round."""

    def on_stop(self) -> None:
        """At the very end, also after an error: the place to close what was opened."""


@dataclass(frozen=True)
class Watch:
    """Who is told how far an audit has come, in place of the bars that it would show. All are optional.

    ```python
    from fedveil.federation.observers import Watch

    watch = Watch(stage=print, attack=lambda done, total: print(f"{done / total:.0%}"))
    fedveil.audit(task, defense, watch=watch)
    ```
    """

    observers: tuple[Observer, ...] = ()  # of the training runs, first the undefended one, then the defended one
    plan: Callable[[Sequence[Stage]], None] | None = None  # called once, with all stages ahead
    stage: Callable[[str], None] | None = None  # called with a line that names the stage which starts
    attack: Report | None = None  # called with (done, in all) while an attack runs, over all attacked rounds
