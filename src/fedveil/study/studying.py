"""Run a study: plan it, carry it out, and gather what is there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedveil.auditing.audit_result import AuditResult
from fedveil.errors import FedveilError
from fedveil.federation.observers import Watch
from fedveil.leakage.catalog import METRICS, applies
from fedveil.study.definition import Scaled, Study
from fedveil.study.figures import Drawing, figures_of
from fedveil.study.leaderboard import Board, boards
from fedveil.study.outcome import Outcome, outcome_of
from fedveil.study.planning import Estimates
from fedveil.study.rooms import IndexedStore, kept_result
from fedveil.study.running import Cell, Grid, audited
from fedveil.workers import Workers

HOME = Path("studies")  # where the papers' tables are


@dataclass(frozen=True, eq=False)
class StudyPlan:
    """A study whose every audit was checked."""

    scaled: Scaled
    grid: Grid
    missing: dict[str, str]  # cells that cannot be run here, and why
    estimates: Estimates
    seconds: dict[str, float]


def find_study(name: str) -> Path:
    """The file of a study: a path, or PAPER/TABLE in the folder of studies here or above."""
    given = Path(name)
    if given.suffix == ".toml" and given.is_file():
        return given
    for folder in (Path.cwd(), *Path.cwd().parents):
        path = folder / HOME / f"{name}.toml"
        if path.is_file():
            return path
    raise FedveilError(f"there is no study '{name}': name a TOML file, or one of `fedveil study list`")


def list_studies(folder: Path | None = None) -> list[tuple[str, Path]]:
    """The studies in a folder by their short names; files that others are based on are none."""
    for above in (folder,) if folder is not None else (Path.cwd(), *Path.cwd().parents):
        home = above / HOME
        if home.is_dir():
            found = sorted(home.rglob("*.toml"))
            return [(str(p.relative_to(home).with_suffix("")), p) for p in found if not p.stem.startswith("base")]
    return []


def plan_study(path: Path, scale: str, store: IndexedStore, command: str = "") -> StudyPlan:
    """Check every audit of a study, and tell what is to do. Cells that cannot be run stay empty, with the reason."""
    study = Study.read(path)
    scaled, _ = study.at_scale(scale)
    try:
        cells = list(scaled.cells().values())
        check_metrics(scaled)
    except FedveilError as error:
        raise FedveilError(f"{path}: {error}") from None
    missing, estimates, seconds = dict[str, str](), Estimates(store), dict[str, float]()
    usable = list[Cell]()
    for cell in cells:
        try:
            seconds[cell.name] = estimates.add(cell.experiment)
            usable.append(cell)
        except FedveilError as error:
            missing[cell.name] = str(error)
    if not usable:
        raise FedveilError(f"{path}: nothing of it can be run here: {next(iter(missing.values()))}")
    for metric in dict.fromkeys(row.metric or column.metric for _, row, column in scaled.places()):
        if estimates.kinds and not any(applies(metric, kind) for kind in estimates.kinds):
            raise FedveilError(f"{path}: {metric} does not apply to {' or '.join(sorted(estimates.kinds))}")
    return StudyPlan(scaled, Grid(study_name(path, scale), usable, command), missing, estimates, seconds)


def check_metrics(scaled: Scaled) -> None:
    """Refuse a metric that no audit would measure. The smallest scale leaves out what takes long."""
    if scaled.scale == "smoke":
        return
    cells = scaled.cells()
    for group, row, column in scaled.places():
        metric = row.metric or column.metric
        needed = _needed(metric)
        if needed:
            section, _, name = needed.partition(".")
            experiment = cells[scaled.cell_name(group, row, column, scaled.seeds[0])].experiment
            if getattr(getattr(experiment, section), name) in ("none", 0):
                raise FedveilError(f"{column.head or row.name}: {metric} is only measured where {needed} is set")


def _needed(metric: str) -> str:
    """The setting without which a metric is not measured; nothing where there is none."""
    if metric == "local":
        return "federation.local_utility"
    tool = METRICS[metric].tool if metric in METRICS else ""
    return f"audit.{tool}" if tool else ""


def run_study(
    plan: StudyPlan,
    store: IndexedStore,
    workers: Workers,
    watch: Watch | None = None,
    done: Callable[[Cell, float], None] | None = None,
) -> Outcome:
    """Carry out a plan."""
    audits = {cell.name: audit for cell, audit in audited(plan.grid, store, workers, watch, done)}
    return outcome_of(plan.scaled, audits, plan.missing)


def gathered(plan: StudyPlan, store: IndexedStore) -> Outcome:
    """The table from what is there already; nothing is computed."""
    return _gathered(plan, store)[0]


def illustrated(plan: StudyPlan, store: IndexedStore) -> tuple[Outcome, list[Drawing]]:
    """The same with the figures."""
    outcome, audits = _gathered(plan, store)
    return outcome, figures_of(plan.scaled, outcome, audits, store)


def ranked(plan: StudyPlan, store: IndexedStore) -> list[Board]:
    """The boards of a leaderboard, as far as their audits are there."""
    return boards(plan.scaled, *_kept(plan, store))


def _gathered(plan: StudyPlan, store: IndexedStore) -> tuple[Outcome, dict[str, AuditResult]]:
    audits, missing = _kept(plan, store)
    return outcome_of(plan.scaled, audits, missing), audits


def _kept(plan: StudyPlan, store: IndexedStore) -> tuple[dict[str, AuditResult], dict[str, str]]:
    """The audits that are there, and why others are not."""
    audits, missing = dict[str, AuditResult](), dict(plan.missing)
    for cell in plan.grid.cells:
        found = kept_result(store, cell.experiment)
        if found is None:
            missing[cell.name] = "not run yet"
        else:
            audits[cell.name] = found
    return audits, missing


def study_name(path: Path, scale: str) -> str:
    """What the index calls a study: the same file has the same name wherever it lies."""
    return f"study {path.stem} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]} {scale}"
