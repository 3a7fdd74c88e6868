"""`tune`: the setting that leaks least within a cost, or costs least within a leak. That none does is an answer too.

Optuna proposes settings by two goals, less leakage and less loss of utility. Its draws follow from a seed and from what
earlier trials came to, and every audit is kept in the store: the same command therefore takes the same way again, finds
its finished trials in the store, and goes on where it stopped.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedveil.auditing.again import config_toml
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.cost import measure_cost
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.result import Document, Estimate, Question
from fedveil.auditing.training import train_both
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.observers import Watch
from fedveil.leakage.catalog import METRICS
from fedveil.study.comparison import Leak, Point
from fedveil.study.folding import floors_of, leaks_of, point_of
from fedveil.study.rooms import IndexedStore, Rooms
from fedveil.study.space import Space
from fedveil.study.strengths import Setting
from fedveil.tasks.measures import Measure, measure
from fedveil.workers import Workers

FRESH = 1000  # the first seed of the runs that confirm a choice: none of them took part in it


@dataclass(frozen=True)
class Limit:
    """What must be kept: a loss of utility, or a share that leaks."""

    kind: Literal["loss", "leak"]
    most: float

    @property
    def words(self) -> str:
        """The limit in words."""
        what = "of utility lost" if self.kind == "loss" else "leaked"
        return (
            f"at most {100 * self.most:g} % {what}"
            if self.kind == "leak"
            else f"at most {100 * self.most:g} points {what}"
        )


class Trial(Document):
    """One setting that was tried."""

    defense: str
    state: Literal["within", "beyond", "pruned"]
    point: Point | None = None
    why: str = ""  # it was pruned


class Tuned(Document):
    """What tuning came to."""

    limit: str
    question: Question
    utility: str
    trials: list[Trial]
    undefended: Point
    floor: Leak | None
    recommended: str = ""  # as the command line writes it; "" where nothing is
    confirmed: Point | None = None  # the same on fresh seeds, none of which took part in the choice
    words: list[str]
    config: str = ""  # the TOML file of the recommended audit


@dataclass
class Search:
    """One tuning: its task, its space, and what was tried so far."""

    base: Experiment
    spaces: Sequence[Space]
    limit: Limit
    question: Question
    seeds: list[int]
    store: IndexedStore
    workers: Workers
    watch: Watch | None = None
    command: str = ""
    tell: Callable[[str], None] = lambda line: None
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.base.defense:
            raise FedveilError("tuning names its defenses apart: leave the experiment's own defense empty")
        if not self.base.trains:
            raise FedveilError("tuning weighs leakage against utility, so it must train: rounds must be 1 or more")
        if not self.spaces:
            raise FedveilError("name at least one defense: see `fedveil list defenses`")
        self.rooms = Rooms(self.store, self.workers, self.watch)
        for space in self.spaces:  # what cannot be used on this task is told before any work
            try:
                self.rooms.open(self._at(space.built([each.high for each in space.ranges]), self.seeds[0]))
            except FedveilError as error:
                raise FedveilError(f"{space.family}: {error}") from None

    def run(self, trials: int, confirm: int = 2) -> Tuned:
        """Try so many settings, choose, and confirm the choice on so many fresh seeds."""
        optuna = _optuna()
        bare = self._audits(Chain(), self.seeds)
        self.undefended = point_of(None, bare)
        self.ceiling = self.undefended.leaked(self.question)
        if self.ceiling is None:
            raise FedveilError(f"no attack asks the question '{self.question}': name one that does")
        self.measured = measure(bare[0].result.cost.metric)
        self.floor = floors_of(bare).get(self.question)
        if self.floor is not None and self.ceiling.found.low <= self.floor.found.high:
            return self._told(None, None, bare[0])  # what attacks cannot do is not worth a search
        study = optuna.create_study(
            directions=["minimize", "minimize"], sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=8)
        )
        study.optimize(lambda trial: self._tried(trial, optuna), n_trials=trials)
        chosen = self._chosen()
        confirmed = None
        if chosen is not None and confirm:
            self.tell(f"confirming {chosen.defense} on {confirm} fresh seeds")
            seeds = [FRESH + number for number in range(confirm)]
            again = self._audits(Chain.of(chosen.defense), seeds)
            confirmed = point_of(Setting("recommended", Chain.of(chosen.defense)), again)
        return self._told(chosen, confirmed, bare[0])

    # ---- one setting -----------------------------------------------------------------------------------------

    def _tried(self, trial: Any, optuna: Any) -> tuple[float, float]:
        names = [space.family for space in self.spaces]
        family = trial.suggest_categorical("defense", names) if len(names) > 1 else names[0]
        chain = self.spaces[names.index(family)].suggested(trial)
        hopeless = self._hopeless(chain)
        if hopeless:
            self.trials.append(Trial(defense=str(chain), state="pruned", why=hopeless))
            self.tell(f"{chain}: pruned, {hopeless}")
            raise optuna.TrialPruned
        point = point_of(Setting(family, chain), self._audits(chain, self.seeds))
        leak, loss = self._leak(point), self._loss(point)
        within = (loss if self.limit.kind == "loss" else leak) <= self.limit.most
        self.trials.append(Trial(defense=str(chain), state="within" if within else "beyond", point=point))
        self.tell(
            f"{chain}: leaks {leak:.0%}, loses {100 * loss:.1f} points; {'within' if within else 'beyond'} the limit"
        )
        return leak, loss

    def _hopeless(self, chain: Chain) -> str:
        """Why a setting is beyond the limit for certain, from the cheaper half of its audit; "" if it is not."""
        experiment = self._at(chain, self.seeds[0])
        if self.limit.kind == "loss":
            shop = self.rooms.open(experiment)
            bare, defended = train_both(shop)
            cost = measure_cost(shop.task, bare.run if bare else None, defended.run if defended else None)
            gained = None if cost.difference is None else self._gained(cost.difference)
            surely = gained is not None and gained.high < -self.limit.most
            return f"it surely loses more: {_change(cost.difference, self.measured)}" if surely else ""
        if experiment.audit.rounds != (1,):
            return ""
        untrained = experiment.model_copy(update={"trains": False})
        leak = point_leak(self.rooms.audit(self.rooms.open(untrained), self.command), self.question)
        if leak is None or leak.low <= self.limit.most:
            return ""
        return f"it surely leaks more: {leak.mean:.0%} [{100 * leak.low:.0f}–{100 * leak.high:.0f}]"

    def _audits(self, chain: Chain, seeds: Sequence[int]) -> list[AuditResult]:
        return [self.rooms.audit(self.rooms.open(self._at(chain, seed)), self.command) for seed in seeds]

    def _at(self, chain: Chain, seed: int) -> Experiment:
        return self.base.model_copy(update={"defense": chain.defenses, "seed": seed})

    def _leak(self, point: Point) -> float:
        leak = point.leaked(self.question)
        assert leak is not None
        return leak.found.mean

    def _loss(self, point: Point) -> float:
        """Utility lost, so that more is worse; of an error, as a share of the undefended one."""
        assert point.loss is not None
        return -self._gained(point.loss).mean

    def _gained(self, difference: Estimate) -> Estimate:
        ends = sorted(self.measured.gain(value) for value in (difference.low, difference.high))
        unit = 1.0 if self.measured.share else max(abs(self.undefended.utility.mean), 1e-12)
        mean = self.measured.gain(difference.mean)
        return Estimate(mean=mean / unit, low=ends[0] / unit, high=ends[1] / unit, count=difference.count)

    # ---- the choice ------------------------------------------------------------------------------------------

    def _chosen(self) -> Trial | None:
        """Within the limit: what leaks least, or costs least; of equals the other goal decides."""
        able = [each for each in self.trials if each.state == "within" and each.point is not None]

        def goals(trial: Trial) -> tuple[float, float]:
            assert trial.point is not None
            leak, loss = self._leak(trial.point), self._loss(trial.point)
            return (leak, loss) if self.limit.kind == "loss" else (loss, leak)

        return min(able, key=goals, default=None)

    def _told(self, chosen: Trial | None, confirmed: Point | None, bare: AuditResult) -> Tuned:
        words, recommended, config = self._words(chosen, confirmed), "", ""
        if chosen is not None and self._protects(confirmed or chosen.point):
            recommended = chosen.defense
            experiment = self._at(Chain.of(recommended), self.seeds[0])
            config = config_toml(experiment.described() | {"task": bare.result.provenance.config.get("task", {})})
        return Tuned(
            limit=self.limit.words,
            question=self.question,
            utility=bare.result.cost.metric,
            trials=self.trials,
            undefended=self.undefended,
            floor=self.floor,
            recommended=recommended,
            confirmed=confirmed,
            words=words,
            config=config,
        )

    def _protects(self, point: Point | None) -> bool:
        """Whether it leaks clearly less than no defense."""
        leak = None if point is None else point.leaked(self.question)
        assert self.ceiling is not None
        return leak is not None and leak.found.high < self.ceiling.found.low

    def _words(self, chosen: Trial | None, confirmed: Point | None) -> list[str]:
        assert self.ceiling is not None
        pruned = sum(each.state == "pruned" for each in self.trials)
        tried = f"{len(self.trials)} settings were tried, {pruned} of them pruned"
        beside = f"without a defense {_share(self.ceiling)}" + (f", a guess {_share(self.floor)}" if self.floor else "")
        if self.floor is not None and self.ceiling.found.low <= self.floor.found.high:
            return [f"The attacks hardly beat a guess even without a defense ({beside}): nothing can be tuned by them."]
        if chosen is None or chosen.point is None:
            return [f"Nothing within this limit was found ({self.limit.words}). {tried}; {beside}."]
        point = confirmed or chosen.point
        leak = point.leaked(self.question)
        assert leak is not None
        known = "confirmed on fresh seeds" if confirmed is not None else "not confirmed on fresh seeds"
        loss, numbers = self._loss(point), f"{_share(leak)} leaks ({beside})"
        lost = f"utility changes by {_change(point.loss, self.measured)}" if point.loss is not None else ""
        if not self._protects(point):
            best = f"the best is {chosen.defense}, where {numbers}"
            return [f"Nothing within this limit protects ({self.limit.words}): {best}. {tried}."]
        told = [f"Recommended: {chosen.defense}. {numbers}; {lost} ({known}). {tried}."]
        beyond = (loss if self.limit.kind == "loss" else leak.found.mean) > self.limit.most
        sure = point.loss is not None and self._gained(point.loss).low >= -self.limit.most
        sure = sure if self.limit.kind == "loss" else leak.found.high <= self.limit.most
        if beyond:
            told.append(
                "On the fresh seeds it lies beyond the limit: it was lucky when it was chosen. Choose by more seeds."
            )
        elif not sure:
            told.append("The interval reaches beyond the limit: use more seeds, victims or test examples to be sure.")
        else:
            told.append("The whole 95 % interval lies within the limit.")
        told.append(point.guarantee)
        return told


def point_leak(audit: AuditResult, question: Question) -> Estimate | None:
    """What the stronger attacker gets of one audit, which need not have trained."""

    leaks = [each.found for each in leaks_of([audit.result], question, ("naive", "adaptive")).values()]
    return max(leaks, key=lambda each: each.mean, default=None)


def _share(leak: Leak) -> str:
    metric = METRICS[leak.measure]
    factor, digits = (100, 0) if metric.share else (1, 2)
    return (
        f"{metric.format(leak.found.mean)} [{factor * leak.found.low:.{digits}f}–{factor * leak.found.high:.{digits}f}]"
    )


def _change(difference: Estimate | None, measured: Measure) -> str:
    if difference is None:
        return "an unknown amount"
    return f"{measured.change(difference.mean)} [{measured.change(difference.low)}, {measured.change(difference.high)}]"


def _optuna() -> Any:
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise FedveilError("tuning needs Optuna: pip install 'fedveil[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
