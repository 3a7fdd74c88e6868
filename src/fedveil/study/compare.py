"""`compare`: every defense over its strengths on one task, leakage against utility."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.observers import Watch
from fedveil.federation.progress import watch_with
from fedveil.federation.settings import FederationSettings
from fedveil.files import writable_folder, write_atomically
from fedveil.ownership import owned
from fedveil.progress import Meter, style_for
from fedveil.study.comparison import FILE, Comparison, read_comparison
from fedveil.study.folding import PICTURES, floors_of, pictures_of, point_of, with_front
from fedveil.study.planning import Estimates
from fedveil.study.rooms import IndexedStore, plain_settings
from fedveil.study.running import Cell, Grid, audited
from fedveil.study.strengths import ALL, Setting, every_defense, families, settings_of
from fedveil.tasks.measures import measure
from fedveil.tasks.task import Task
from fedveil.tensors import write_safetensors
from fedveil.workers import Workers, opened

SUITE = "quick"  # of attacks, where none is named
PICTURE_FILE = "pictures.safetensors"
Asked = str | Defense | Chain


@dataclass(frozen=True, eq=False)
class CompareResult:
    """What a comparison came to: `comparison` is the document, `pictures` are the reconstructions behind its points.

    Print it, or take `frame()`, `csv(path)`, `markdown()`, `latex()`; `report(path)` writes the page.
    """

    comparison: Comparison
    # "originals", "undefended", and "point N": (up to 4, channels, h, w) in [0, 1]; empty where data are no pictures.
    pictures: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.comparison)

    __repr__ = __str__

    def frame(self) -> Any:
        """Every number as a pandas DataFrame."""
        return self.comparison.frame()

    def csv(self, path: Path | str) -> Path:
        """Write every number as CSV."""
        return self.comparison.csv(path)

    def markdown(self) -> str:
        """The table in Markdown."""
        return self.comparison.markdown()

    def latex(self) -> str:
        """The table in LaTeX."""
        return self.comparison.latex()

    def report(self, path: Path | str) -> Path:
        """Write the page with the frontier, one HTML file that opens offline."""
        from fedveil.report.frontier import write_frontier  # the page stands on the study; only this method looks up

        path = Path(path)
        writable_folder(path.parent)
        write_frontier(self.comparison, self.pictures, path)
        return path

    def save(self, folder: Path | str) -> Path:
        """Write the document and the pictures, from which the page can be made again."""
        folder = Path(folder)
        with owned(folder):
            write_safetensors(folder / PICTURE_FILE, {n: np.ascontiguousarray(p) for n, p in self.pictures.items()})
            write_atomically(folder / FILE, self.comparison.model_dump_json(indent=1).encode())
        return folder

    @classmethod
    def load(cls, folder: Path | str) -> CompareResult:
        """What `save` wrote."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        comparison, path = read_comparison(Path(folder)), Path(folder) / PICTURE_FILE
        try:
            return cls(comparison, load(path.read_bytes()))
        except (OSError, SafetensorError):
            return cls(comparison)  # a page without pictures is still a page


@dataclass(frozen=True, eq=False)
class Plan:
    """A comparison whose every audit was checked: what is compared, and what that takes."""

    base: Experiment
    settings: list[Setting]
    seeds: list[int]
    left_out: dict[str, str]
    grid: Grid
    estimates: Estimates
    seconds: dict[str, float]  # by cell, of what is still to do for it


def compare(
    task: Task | Experiment,
    defenses: str | Sequence[Asked] = ALL,
    *,
    strengths: int = 5,
    seeds: int | Sequence[int] = 1,
    attack: Any = None,
    suite: str | None = None,
    federation: FederationSettings | None = None,
    settings: AuditSettings | None = None,
    store: Store | Path | str | None = None,
    workers: int | Workers = 1,
    progress: bool | None = None,
) -> CompareResult:
    """Audit every defense over its strengths, and set what leaks against what it costs.

    task: or a whole `Experiment`, whose defense must be empty.
    defenses: names or instances, with fields if wanted, or "all". A field that sets the strength takes a defense as it
        is; the others go from weak to strong along their own axis. Chains are joined by "+".
    seeds: how many, from 0 on, or which. Intervals cover other examples and other runs.
    attack, suite: as for `audit`; by default the suite "quick", with no attack left out early.
    store: a folder that keeps every stage. A comparison that was stopped goes on from there.
    workers: so many processes make whole audits at once, with the same results.
    """
    if isinstance(task, Experiment):
        base = task
    else:
        named = attack is None or isinstance(attack, list | tuple)
        base = Experiment(
            task=task,
            federation=federation or FederationSettings(),
            audit=dataclasses.replace(settings or AuditSettings(), stop_when_settled=False),
            attack=attack if named else (attack,),
            suite=suite or (SUITE if attack is None else None),
        )
    kept = IndexedStore(Store.of(store).folder)
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    with opened(workers) as pool, Meter(style_for(progress)) as meter:
        watch = watch_with(meter)
        plan = planned(base, defenses, strengths, numbers, kept, "fedveil.compare(...)")
        meter.say(plan.estimates.told)
        return compared(plan, kept, pool, watch)


def planned(
    base: Experiment, asked: str | Sequence[Asked], strengths: int, seeds: list[int], store: IndexedStore, command: str
) -> Plan:
    """Check every audit of a comparison, and tell what is to do."""
    if base.defense:
        raise FedveilError("a comparison names its defenses apart: leave the experiment's own defense empty")
    if not base.trains:
        raise FedveilError("a comparison sets leakage against utility, so it must train: rounds must be 1 or more")
    if not seeds or len(set(seeds)) < len(seeds):
        raise FedveilError(f"seeds must be one or more different numbers (got {seeds})")
    everything = asked == ALL
    wanted: Sequence[Asked] = every_defense() if everything else families(asked) if isinstance(asked, str) else asked
    if not wanted:
        raise FedveilError("name at least one defense, or all: see `fedveil list defenses`")
    swept = [setting for each in wanted for setting in settings_of(each, strengths)]
    if len({str(setting.chain) for setting in swept}) < len(swept):
        raise FedveilError("a defense is named twice at the same strength")
    estimates, settings, left_out = Estimates(store), list[Setting](), dict[str, str]()
    seconds = {Chain(): estimates.add(_at(base, Chain(), seeds[0]))}  # what is wrong with the task is told as such
    for setting in swept:
        if setting.family in left_out:
            continue
        try:
            seconds[setting.chain] = estimates.add(_at(base, setting.chain, seeds[0]))
            settings.append(setting)
        except FedveilError as error:
            if not everything:
                raise FedveilError(f"{setting.chain}: {error}") from None
            left_out[setting.family] = str(error)
    chains = [Chain(), *(setting.chain for setting in settings)]
    places = [(chain, seed) for seed in seeds for chain in chains]
    cells = [Cell(f"{chain}, seed {seed}", _at(base, chain, seed)) for chain, seed in places]
    expected = {
        cell.name: seconds[chain] if seed == seeds[0] else estimates.add(cell.experiment)
        for cell, (chain, seed) in zip(cells, places, strict=True)
    }
    return Plan(base, settings, seeds, left_out, Grid(_name(cells), cells, command), estimates, expected)


def compared(
    plan: Plan,
    store: IndexedStore,
    workers: Workers,
    watch: Watch | None = None,
    done: Callable[[Cell, float], None] | None = None,
) -> CompareResult:
    """Carry out a plan."""
    started, begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.perf_counter()
    audits: dict[str, list[AuditResult]] = {}
    for cell, audit in audited(plan.grid, store, workers, watch, done):
        audits.setdefault(str(cell.experiment.chain), []).append(audit)
    bare = audits[str(Chain())]
    first = bare[0].result
    undefended = point_of(None, bare)
    points = [point_of(setting, audits[str(setting.chain)]) for setting in plan.settings]
    points, undefended = with_front(points, undefended, measure(first.cost.metric))
    shown = [pictures_of(bare[0]), *(pictures_of(audits[str(setting.chain)][0]) for setting in plan.settings)]
    names = ["undefended", *(f"point {place}" for place in range(len(points)))]
    pictures = {name: each for name, each in zip(names, shown, strict=True) if each is not None}
    if pictures:
        pictures["originals"] = bare[0].images.originals[:PICTURES]
    comparison = Comparison(
        data=first.data,
        model=first.model,
        modality=first.modality,
        protocol=first.protocol,
        attacked=first.attacked,
        rounds=first.cost.rounds,
        utility=first.cost.metric,
        candidates=first.candidates,
        seeds=plan.seeds,
        attacks=[run.attack for run in first.attacks],
        undefended=undefended,
        points=points,
        floors=floors_of(bare),
        left_out=plan.left_out,
        warnings=_warnings(bare),
        command=plan.grid.command,
        config=plain_settings(plan.base) | {"task": dict(first.provenance.config.get("task", {}))},
        versions=first.provenance.versions,
        started=started,
        seconds=time.perf_counter() - begun,
    )
    return CompareResult(comparison, pictures)


def _at(base: Experiment, chain: Chain, seed: int) -> Experiment:
    return base.model_copy(update={"defense": chain.defenses, "seed": seed})


def _name(cells: Sequence[Cell]) -> str:
    """What the index calls this comparison: the same audits have the same name."""
    told = json.dumps([cell.experiment.described() for cell in cells], default=str, sort_keys=True)
    return f"compare {hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _warnings(bare: Sequence[AuditResult]) -> list[str]:
    """What the undefended audits say of the task itself."""
    found = ["Without any defense: " + warning.words for audit in bare for warning in audit.result.verdict.warnings]
    for audit in bare:
        cost = audit.result.cost
        if cost.undefended is None or cost.majority is None:
            continue
        read = measure(cost.metric)
        if read.gain(cost.undefended.mean) <= read.gain(cost.majority):
            found.append(f"The undefended model is no better than {read.without_model}: train for more rounds.")
    return list(dict.fromkeys(found))
