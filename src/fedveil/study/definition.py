"""A study: a table of a paper as a file. It says which audits to run, what to read off them, and what was published.

```toml
title = "Table 1: main results"
base = "base.toml"                 # keys that several tables share; those of this file go over them
seeds = [0, 1, 2]
attack = ["inverting-gradients"]   # this and [task], [federation], [audit] are the keys of an audit's file

[[groups]]                         # blocks of the table, such as data sets
name = "MNIST"
set = { "task.data" = "mnist" }

[[rows]]
name = "DP-Gas"
defense = "gaussian-noise:sigma=1/255"

[[columns]]
head = "PSNR"
metric = "psnr"                    # or test, validation, local: utility
better = "low"                     # what the paper counts as good

[published.MNIST]                  # group, row: one number per column, as printed
DP-Gas = ["9.2340"]

[scale.desk]                       # what is cut where the published setting takes too long
"federation.rounds" = 5
```
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedveil.auditing.experiment import Experiment, read_toml
from fedveil.auditing.roles import Role
from fedveil.errors import FedveilError
from fedveil.fields import problems
from fedveil.leakage.catalog import METRICS
from fedveil.registry import attacks
from fedveil.study.running import Cell
from fedveil.study.strengths import every_defense, settings_of

SCALES = ("paper", "desk", "smoke")
# Metrics of the trained model ("local": clients' models before the upload; "mcc": Matthews' correlation), and of the
# time of a round.
UTILITY = ("test", "validation", "local", "mcc", "seconds", "slowdown")
SECTIONS = ("task", "federation", "audit")
AUDIT_KEYS = (*SECTIONS, "attack", "suite", "backend", "device")
# What runs in seconds and needs no data set: the structure of a study stays.
SMOKE: dict[str, Any] = {
    "task.data": "digits",
    "task.model": "mlp:hidden=[16]",
    "task.limit": 80,
    "task.split": "70/15/15",
    "federation.rounds": 1,
    "federation.warmup_rounds": 0,
    "federation.batch_size": 8,
    "federation.lr": 0.1,
    "audit.victims": 2,
    "audit.batch_size": 1,
    "audit.rounds": [1],
    "audit.candidates": 5,
    "audit.reference": "none",
    "audit.lpips": "none",
    "seeds": [0],
}
MOST_CLIENTS = 3  # at smoke scale


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Group(_Part):
    """A block of the table."""

    name: str = ""
    set: dict[str, Any] = {}


class Line(_Part):
    """A row of the table: a defense, or what else is varied."""

    name: str
    defense: str = "none"
    by_group: dict[str, str] = {}  # in place of it in some groups
    set: dict[str, Any] = {}
    metric: str = ""  # in place of the columns'
    role: Role | None = None  # in place of the columns'
    round: int = 0  # of this attacked round alone; 0: of all together
    only: list[str] = []  # groups that have this row; empty: all
    own: bool = False  # the method that the paper proposes
    x: float | None = None  # where it stands on the axis of a figure
    series: str = ""  # the line of a figure that it belongs to
    note: str = ""

    def defense_in(self, group: str) -> str:
        """The defense of this row in a group."""
        return self.by_group.get(group, self.defense)


class Read(_Part):
    """A column of the table: what is read off an audit."""

    head: str
    metric: str = ""
    role: Role = "naive"
    attack: str = ""  # one of several; "": the one that gets most
    at: Literal["", "1/3", "2/3", "all"] = ""  # after which share of the attack's steps
    better: Literal["", "low", "high"] = ""  # what the paper counts as good
    factor: float = 1.0  # from our unit to the published one
    set: dict[str, Any] = {}


class Figure(_Part):
    """A figure of the same audits.

    lines: columns `y` against the rows' `x`, a line for each series. columns: rows against the columns' numbers.
    scatter: column `y` against column `x`, a point for each row. rounds: accuracy after every round, a line for each
    row. pictures: what was rebuilt, or what `role` sees. perturbations: the perturbed inputs and what was added.
    histogram: entries of the update's first tensor, with the defense and without. variance: of what a row's defense
    sends for a weight.
    """

    title: str
    kind: Literal["lines", "columns", "scatter", "rounds", "pictures", "perturbations", "histogram", "variance"]
    x: str = ""  # scatter: a column; else the title of the axis
    y: list[str] = []  # columns; by default all that have a better direction
    log: bool = False  # the axis of x
    groups: list[str] = []  # by default all
    rows: list[str] = []  # by default all
    attack: str = ""  # of pictures
    role: Role = "naive"  # of pictures


class Study(_Part):
    """A whole table."""

    title: str
    paper: str = ""
    source: str = ""  # the file of the paper's text, where a test looks for the published digits
    notes: list[str] = []
    seeds: list[int] = [0]
    settings: dict[str, Any] = Field(default={}, exclude=True)  # the keys of an audit
    groups: list[Group] = [Group()]
    rows: list[Line]
    columns: list[Read]
    every: int = Field(default=0, ge=0, le=20)  # a leaderboard: strengths at which every registered defense is a row
    spelled: dict[str, str] = {}  # of these defenses, where a field other than the strength must be set
    hours: float = 0.0  # that it may take on two cores; 0: nothing is said
    published: dict[str, dict[str, list[str]]] = {}
    figures: list[Figure] = []
    scale: dict[str, dict[str, Any]] = {}

    @field_validator("rows", "columns", "groups", "seeds")
    @classmethod
    def _some(cls, value: list[Any], info: pydantic.ValidationInfo) -> list[Any]:
        if not value:
            raise ValueError(f"{info.field_name} is empty: there is nothing to run")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        wrong = [
            f"{where} '{each.metric}' is no metric: {_nearest(each.metric, (*UTILITY, *METRICS))}"
            for where, listed in (("column", self.columns), ("row", self.rows))
            for each in listed
            if each.metric and each.metric not in (*UTILITY, *METRICS)
        ]
        if any(not column.metric and not row.metric for column in self.columns for row in self.rows):
            wrong.append("every column, or every row, needs a metric")
        names = {group.name for group in self.groups}, {row.name for row in self.rows}
        if len(names[1]) < len(self.rows):
            wrong.append("two rows have one name")
        wrong += [
            f"row '{row.name}' is only in '{name}', which is no group"
            for row in self.rows
            for name in row.only
            if name not in names[0]
        ]
        heads = {column.head for column in self.columns}
        for figure in self.figures:
            named = [("column", each, heads) for each in (*figure.y, *([figure.x] if figure.kind == "scatter" else ()))]
            named += [("group", each, names[0]) for each in figure.groups]
            named += [("row", each, names[1]) for each in figure.rows]
            wrong += [f"figure '{figure.title}': '{n}' is no {what}" for what, n, known in named if n not in known]
        for group, rows in self.published.items():
            if group not in names[0]:
                wrong.append(f"published numbers of '{group}', which is no group")
            for row, numbers in rows.items():
                if row not in names[1]:
                    wrong.append(f"published numbers of '{row}', which is no row")
                if len(numbers) != len(self.columns):
                    wrong.append(f"{len(numbers)} published numbers of '{row}' for {len(self.columns)} columns")
        wrong += [
            f"there is no scale '{name}': there are {', '.join(SCALES)}" for name in self.scale if name not in SCALES
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """The study of a file; whatever is wrong with it is told at once, in one line."""
        found = _with_base(path)
        settings = {key: found.pop(key) for key in AUDIT_KEYS if key in found}
        known = [name for name in cls.model_fields if name != "settings"]
        unknown = [key for key in found if key not in known]
        if unknown:
            near = _nearest(unknown[0], (*known, "base", *AUDIT_KEYS))
            raise FedveilError(f"{path}: unknown key '{unknown[0]}': {near}")
        every, spelled = found.get("every"), found.get("spelled", {})
        if (
            isinstance(every, int)
            and every > 0
            and isinstance(spelled, dict)
            and isinstance(found.get("rows", []), list)
        ):
            found["rows"] = [*found.get("rows", []), *_every_defense(every, spelled)]
        try:
            return cls(**found, settings=settings)
        except pydantic.ValidationError as error:
            raise FedveilError(f"{path}: {problems(error)}") from None

    # ---- what is run ---------------------------------------------------------------------------------------

    def at_scale(self, scale: str) -> tuple[Scaled, list[str]]:
        """The study at a scale, and what that cuts, in words."""
        if scale not in SCALES:
            raise FedveilError(f"unknown scale '{scale}': there are {', '.join(SCALES)}")
        changes = dict(self.scale.get(scale, {}))
        if scale == "smoke":
            changes = {**SMOKE, **changes}
        seeds, only = changes.pop("seeds", self.seeds), changes.pop("only", None)
        by_group = changes.pop("groups", {})
        wrong = [name for name in (*(only or ()), *by_group) if name not in {group.name for group in self.groups}]
        if wrong:
            raise FedveilError(f"scale '{scale}' names the group '{wrong[0]}', which is not in the study")
        kept = [group for group in self.groups if only is None or group.name in only]
        scaled = Scaled(self, scale, changes, list(seeds), kept, dict(by_group))
        return scaled, scaled.cuts()


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A study at one scale."""

    study: Study
    scale: str
    changes: dict[str, Any]  # of an audit's keys, over those of groups, rows and columns
    seeds: list[int]
    groups: list[Group]  # that are run at this scale
    by_group: dict[str, dict[str, Any]]  # further changes in some of them

    def experiment(self, group: Group, row: Line, column: Read, seed: int) -> Experiment:
        """The audit behind a cell of the table."""
        data = {key: dict(value) if isinstance(value, dict) else value for key, value in self.study.settings.items()}
        for changes in (group.set, row.set, column.set, self.changes, self.by_group.get(group.name, {})):
            for key, value in changes.items():
                _put(data, key, value)
        defense = row.defense_in(group.name)
        data |= {"seed": seed, "defense": [] if defense == "none" else defense}
        if self.scale == "smoke":
            _shrink(data)
        try:
            return Experiment.checked(data)
        except FedveilError as error:
            where = ", ".join(name for name in (group.name, row.name, column.head) if name)
            raise FedveilError(f"{where}: {error}") from None

    def cells(self) -> dict[str, Cell]:
        """Every audit once, by name."""
        found: dict[str, Cell] = {}
        for seed in self.seeds:
            for group, row, column in self.places():
                name = self.cell_name(group, row, column, seed)
                if name not in found:
                    found[name] = Cell(name, self.experiment(group, row, column, seed))
        return found

    def places(self) -> Iterator[tuple[Group, Line, Read]]:
        """All cells of the table."""
        return (
            (group, row, column)
            for group in self.groups
            for row in self.study.rows
            if not row.only or group.name in row.only
            for column in self.study.columns
        )

    def cell_name(self, group: Group, row: Line, column: Read, seed: int) -> str:
        """What the audit behind a cell is called. Columns that set nothing share one, and rows of the same settings."""
        shared = row.name
        if row.metric or row.role or row.round:
            shared = ", ".join([row.defense_in(group.name), *(f"{key} = {value}" for key, value in row.set.items())])
        parts = [group.name, shared, column.head if column.set else ""]
        return ", ".join([*(part for part in parts if part), f"seed {seed}"])

    def cuts(self) -> list[str]:
        """What differs from the published setting."""
        if self.scale == "paper":
            return []
        cuts = [f"{key} = {value}" for key, value in self.changes.items()]
        cuts += [f"{name}: {key} = {value}" for name, each in self.by_group.items() for key, value in each.items()]
        if len(self.groups) < len(self.study.groups):
            cuts.append(f"only {', '.join(group.name for group in self.groups)}")
        if self.seeds != self.study.seeds:
            cuts.append(f"{len(self.seeds)} of {len(self.study.seeds)} seeds")
        if self.scale == "smoke":
            cuts += [f"at most {MOST_CLIENTS} clients", "attacks and defenses of a few steps"]
        return cuts


def _shrink(data: dict[str, Any]) -> None:
    """Few clients, and few steps of everything that takes steps."""
    task = data.setdefault("task", {})
    task["clients"] = min(int(task.get("clients", 4)), MOST_CLIENTS)
    data["attack"] = [_short(attacks.parse(spec) if isinstance(spec, str) else spec) for spec in data.get("attack", [])]
    if not data["attack"]:
        data.pop("attack")
        data.setdefault("suite", "quick")
    if data["defense"]:
        from fedveil.defenses.chain import Chain

        data["defense"] = [_short(each) for each in Chain.of(data["defense"]).defenses]


def _short(thing: Any) -> Any:
    names = {field.name for field in dataclasses.fields(thing)}
    few = {"steps": 3, "restarts": 1, "polish": 0, "pgd_steps": 1}
    return dataclasses.replace(thing, **{name: value for name, value in few.items() if name in names})


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    section, dot, name = key.partition(".")
    if dot and section in SECTIONS:
        data[section] = {**data.get(section, {}), name: value}
    elif not dot and key in AUDIT_KEYS:
        data[key] = value
        if key in ("attack", "suite"):
            data.pop("suite" if key == "attack" else "attack", None)
    else:
        raise FedveilError(f"unknown key '{key}' in a study's settings: {_nearest(key, AUDIT_KEYS)}")


def _with_base(path: Path, depth: int = 0) -> dict[str, Any]:
    """A file over the one that it is based on. Sections and scales are put together, all else is replaced."""
    if depth > 4:
        raise FedveilError(f"{path}: files are based on each other in a circle, or too deeply")
    found = read_toml(path)
    base = found.pop("base", None)
    if base is None:
        return found
    if not isinstance(base, str):
        raise FedveilError(f"{path}: base must be the name of a file (got {base!r:.40})")
    below = _with_base(path.parent / base, depth + 1)
    found |= {key: _over(below.get(key), found[key]) for key in (*SECTIONS, "scale") if key in found}
    return below | found


def _over(below: Any, value: Any) -> Any:
    """A value over that of the base: tables are put together key by key, also those within them."""
    if not (isinstance(value, Mapping) and isinstance(below, Mapping)):
        return value
    return {**below, **{key: _over(below.get(key), each) for key, each in value.items()}}


def _every_defense(strengths: int, spelled: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for every registered defense at each of its strengths: what is registered later is in it, too."""
    settings = [
        (name, each) for name in every_defense() for each in settings_of(str(spelled.get(name, name)), strengths)
    ]
    return [
        {"name": f"{name}, {each.label}" if each.label else name, "defense": str(each.chain)} for name, each in settings
    ]


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}"
