"""What the stages of one audit share: made and checked once, before any long work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from fedveil.attacks.scene import Public, Workbench
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.store import Store
from fedveil.defenses.chain import Chain
from fedveil.federation.observers import Watch
from fedveil.federation.run import Prepared
from fedveil.leakage.modality import Modality
from fedveil.progress import Report
from fedveil.tasks.layout import Layout
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.task import Task
from fedveil.workers import Workers


@dataclass(frozen=True, eq=False)
class Workshop:
    """An experiment with its task, ready to run: one engine, and each chain tried by one step."""

    experiment: Experiment
    task: Task
    modality: Modality
    normalization: Normalization
    store: Store
    workers: Workers
    watch: Watch
    plain: Prepared  # without the defense
    defended: Prepared  # under the defense; the same where there is none

    @classmethod
    def open(cls, experiment: Experiment, task: Task, store: Store, workers: Workers, watch: Watch) -> Self:
        """Check and prepare all that can be, before anything is trained or attacked."""
        raise NotImplementedError

    @property
    def public(self) -> Public:
        """What every attacker knows of the task."""
        task = self.task
        layout = Layout(self.modality.name, task.shape, self.normalization.box())
        return Public(task.model, task.loss, layout, task.classes)

    @property
    def chain(self) -> Chain:
        """The defense."""
        return self.experiment.chain

    def tell(self, line: str) -> None:
        """Say which stage starts."""
        if self.watch.stage:
            self.watch.stage(line)

    def bench(self, report: Report | None = None) -> Workbench:
        """What attacks run with."""
        return Workbench(backend=self.experiment.backend, workers=self.workers, report=report)

    def with_rounds(self, rounds: list[int]) -> Self:
        """The same, attacking other rounds."""
        return replace(self, experiment=self.experiment.with_rounds(rounds))
