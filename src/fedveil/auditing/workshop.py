"""What the stages of one audit share: made and checked once, before any long work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

from fedveil.attacks.scene import Public, Workbench
from fedveil.auditing.auxiliary import Auxiliary, AuxiliarySource
from fedveil.auditing.candidates import HeldOut
from fedveil.auditing.case import Case
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.lineup import Lineup
from fedveil.auditing.reference_training import ReferenceTraining
from fedveil.auditing.requirements import check_experiment
from fedveil.auditing.store import Store
from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import ONE_EXAMPLE, Exposure
from fedveil.federation.checkpoint import configuration
from fedveil.federation.exposure import exposures
from fedveil.federation.observers import Watch
from fedveil.federation.plan import Plan
from fedveil.federation.prepare import prepare
from fedveil.federation.steps import Prepared
from fedveil.leakage.modalities import modality_of
from fedveil.leakage.modality import Modality
from fedveil.ledger.statement import Statement, statement
from fedveil.tasks.task import Task
from fedveil.workers import Workers


@dataclass(frozen=True, eq=False)
class Workshop:
    """An experiment with its task, ready to run: one engine, and each chain tried by one step."""

    experiment: Experiment
    task: Task
    case: Case
    judges: list[str]  # a sentence on each network that compares examples
    watch: Watch
    plain: Prepared  # without the defense
    defended: Prepared  # under the defense; the same where there is none
    lineup: Lineup
    held_out: HeldOut
    auxiliary: Auxiliary | None  # what attackers learn from
    beside: Workshop | None = None  # that of the same task which it was opened beside

    @classmethod
    def open(
        cls,
        experiment: Experiment,
        store: Store,
        workers: Workers,
        watch: Watch,
        beside: Self | None = None,
        sketched: bool = False,
    ) -> Self:
        """Check and prepare all that can be, before anything is trained or attacked.

        beside: that of an experiment with the same task, federation, seed, device and backend: nothing is read,
            measured or compiled again then.
        sketched: for a forecast, see `prepare`.
        """
        task = experiment.build_task() if beside is None else beside.task
        kind = modality_of(task)
        check_experiment(experiment, task, kind)
        held_out, auxiliary = _held_out(experiment, task, kind)
        plan = Plan(task, Chain(), experiment.federation, experiment.seed)
        pool = workers if experiment.trains and experiment.federation.protocol == "fedavg" else None
        made = partial(prepare, backend=experiment.backend, device=experiment.device, workers=pool, sketched=sketched)
        plain = made(plan, engine=None) if beside is None else beside.plain
        defended = made(plan.under(experiment.chain), engine=plain.engine) if experiment.defense else plain
        if beside is not None and beside.experiment.audit.tools == experiment.audit.tools:
            equipped, judges = beside.modality, beside.judges
        else:
            tools = experiment.audit.tools
            if sketched and tools.get("reference") == "trained":
                tools = {**tools, "reference": "sketched"}
            equipped, judges = kind.equipped(task, tools)
        case = Case(
            name=f"{task.name}, {task.model_name}",
            public=Public(task.model, task.loss, equipped.layout(task.shape), task.classes, task.target),
            modality=equipped,
            settings=experiment.audit,
            store=store,
            bench=Workbench(backend=experiment.backend, workers=workers),
            seed=experiment.seed,
            training=ReferenceTraining(plain) if experiment.trains else None,
        )
        lineup = Lineup.of(experiment, task, case, learns=auxiliary is not None)
        return cls(experiment, task, case, judges, watch, plain, defended, lineup, held_out, auxiliary, beside)

    @property
    def chain(self) -> Chain:
        """The defense."""
        return self.experiment.chain

    @property
    def store(self) -> Store:
        """Where stages keep what they come to."""
        return self.case.store

    @property
    def modality(self) -> Modality:
        """The kind of data."""
        return self.case.modality

    @cached_property
    def told(self) -> dict[str, Any]:
        """All that a run without the defense depends on, but for which rounds are recorded."""
        return configuration(unrecorded(self.plain.plan)) if self.beside is None else self.beside.told

    @cached_property
    def exposures(self) -> list[Exposure]:
        """What a client sends by plan; without training, one update for each attacked round."""
        alone = None if self.experiment.trains else len(self.experiment.audit.rounds)
        return exposures(self.task, self.experiment.federation, rounds=alone)

    @cached_property
    def planned(self) -> Statement:
        """What is promised by plan."""
        return statement(self.chain, self.exposures)

    @property
    def one_example(self) -> bool:
        """Whether a formal guarantee of the defense is for one training example."""
        return any(guarantee.protects == ONE_EXAMPLE for _, guarantee in self.planned.holding)

    def tell(self, line: str) -> None:
        """Say which stage starts."""
        if self.watch.stage:
            self.watch.stage(line)

    def with_rounds(self, rounds: list[int]) -> Self:
        """The same, attacking other rounds."""
        return replace(self, experiment=self.experiment.with_rounds(rounds))


def unrecorded(plan: Plan) -> Plan:
    """A plan that records no rounds: which they are changes nothing else."""
    return replace(plan, settings=replace(plan.settings, record_rounds=(), record_clients=None))


def _held_out(experiment: Experiment, task: Task, kind: Modality) -> tuple[HeldOut, Auxiliary | None]:
    """The test examples that are no victims', and what attackers learn from, if any of them learns."""
    settings = experiment.audit
    taken = settings.victims * settings.batch_size if settings.source == "test" else 0
    source = AuxiliarySource(settings, experiment.own_auxiliary, getattr(experiment.task, "data_root", None))
    read = source.read(task)  # what is wrong with it is told whoever learns
    learns = any("auxiliary" in each.needs for each in experiment.attacks)
    held_out = HeldOut.of(kind, task.train, task.test, taken=taken, gives=learns and source.held_out)
    if not learns:
        return held_out, None
    others = (task.train, task.test.subset(range(taken)), held_out.judged)
    return held_out, source.chosen(read, held_out.given, task, others)
