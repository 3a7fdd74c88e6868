"""The configuration of a run: options and TOML file in, one checked object out, and back to TOML."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedveil.attacks.base import Attack
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.auditing.settings import AuditSettings
from fedveil.cli.options import SETTINGS, Command, Given
from fedveil.clients.engine import BACKENDS, Backend
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError, one_line, unknown_name
from fedveil.federation.settings import FederationSettings
from fedveil.fields import Count, field_values, problems
from fedveil.registry import attacks, datasets, defenses, models
from fedveil.tasks.own_files import Reference, is_reference
from fedveil.tasks.partition import partitions
from fedveil.tasks.splits import read_split
from fedveil.tasks.task import Buffers, Task, task
from fedveil.workers import Workers

DEEPEST = 20  # levels of tables and lists inside each other
# Where and how a run is shown is no part of what it is: these are not written down with it.
NOT_KEPT = ("out", "overwrite", "json", "quiet", "fail_if")
FINDINGS = ("exposed", "partly-exposed", "not-judged")  # the status of an audit that --fail-if can name


class TaskSection(BaseModel):
    """[task]: what is learned, by name, or out of Python files of one's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str = "digits"
    model: str = "lenet"
    clients: Count = 4
    split: str = "own"
    partition: str = "iid"
    limit: Count | None = None
    buffers: Buffers = "shared"
    data_root: Path | None = None

    @field_validator("data", "model", "split", "partition")
    @classmethod
    def _known(cls, value: str, info: pydantic.ValidationInfo) -> str:
        """Python files of the user's own are looked for here, not run, and kept so that any folder finds them."""
        readers = {"data": datasets.parse, "model": models.parse, "split": read_split, "partition": partitions.parse}
        try:
            if info.field_name in ("data", "model") and is_reference(value):
                return str(Reference.read(value))
            readers[str(info.field_name)](value)
        except FedveilError as error:
            raise ValueError(str(error)) from None
        return value


class Config(BaseModel):
    """Everything that a run is made of; the keys of the TOML file are these fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, populate_by_name=True)

    command: Literal["audit", "train"] = "audit"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "cpu"
    backend: Backend = "auto"
    workers: str = "auto"
    out: Path | None = None
    overwrite: bool = False
    as_json: bool = Field(default=False, alias="json")
    quiet: bool = False
    fail_if: tuple[str, ...] = ()
    task: TaskSection = TaskSection()
    federation: FederationSettings = FederationSettings()
    audit: AuditSettings = AuditSettings()
    defense: tuple[Defense, ...] = ()
    attack: tuple[Attack, ...] = (InvertingGradients(),)
    trains: bool = Field(default=True, exclude=True)  # not a key: rounds = 0 says no

    @model_validator(mode="before")
    @classmethod
    def _no_rounds(cls, data: dict[str, Any]) -> dict[str, Any]:
        federation = data.get("federation")
        if data.get("command") == "audit" and isinstance(federation, dict) and federation.get("rounds") == 0:
            # The protocol, batch and rate still decide what an update is.
            rest = {key: value for key, value in federation.items() if key not in ("rounds", "record_rounds")}
            return {**data, "federation": rest, "trains": False}
        return data

    @field_validator("backend", mode="before")
    @classmethod
    def _backend(cls, value: Any) -> Any:
        if value not in BACKENDS:
            raise ValueError(str(unknown_name("backend", str(value), BACKENDS)))
        return value

    @field_validator("workers", mode="before")
    @classmethod
    def _workers(cls, value: Any) -> str:
        try:
            Workers.of(str(value))
        except FedveilError as error:
            raise ValueError(str(error)) from None
        return str(value)

    @field_validator("fail_if", mode="before")
    @classmethod
    def _findings(cls, value: Any) -> Any:
        listed = value if isinstance(value, list | tuple) else [value]
        names = [name.strip() for each in listed for name in str(each).split(",")]
        for name in names:
            if name not in FINDINGS:
                raise ValueError(str(unknown_name("finding", name, FINDINGS)))
        return tuple(names)

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        try:
            torch.zeros(1, device=value).item()  # read back: some devices hold no numbers
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = one_line(error).partition(". ")[0].rstrip(".")
            reason = "there is no such kind" if reason.startswith("Expected one of") else reason
            raise ValueError(f"device '{value}' cannot be used here ({reason}): use cpu") from None
        return value

    @field_validator("defense", mode="before")
    @classmethod
    def _defenses(cls, value: Any) -> Any:
        found = [each for part in _built(value, "defense") for each in part]
        try:
            return Chain(tuple(each for each in found if each.name != "none")).defenses
        except FedveilError as error:
            raise ValueError(str(error)) from None

    @field_validator("attack", mode="before")
    @classmethod
    def _attacks(cls, value: Any) -> Any:
        found = _built(value, "attack")
        names = [each.name for each in found]
        if not found:
            raise ValueError("an audit needs an attack: see `fedveil list attacks`")
        if len(set(names)) < len(names):
            raise ValueError(f"each attack can be named once (got {', '.join(names)})")
        return tuple(found)

    def pool(self) -> Workers:
        """The processes that share the work."""
        return Workers.of(self.workers)

    @property
    def chain(self) -> Chain:
        """The defenses as the federation runs them."""
        return Chain(self.defense)

    def build_task(self) -> Task:
        """Read the data and build the model."""
        fields = {name: getattr(self.task, name) for name in TaskSection.model_fields if name != "data"}
        return task(self.task.data, seed=self.seed, **fields)

    def kept(self) -> dict[str, Any]:
        """All that decides what comes out, as plain data in the layout of the file."""
        federation = field_values(self.federation) | ({} if self.trains else {"rounds": 0})
        kept: dict[str, Any] = {
            "command": self.command,
            "seed": self.seed,
            "device": self.device,
            "backend": self.backend,
            "task": {name: str(v) if isinstance(v, Path) else v for name, v in dict(self.task).items()},
            "federation": federation,
        }
        if self.command == "audit":
            for name in ("record_rounds", "record_clients"):  # an audit captures what it attacks
                federation.pop(name)
            kept["audit"] = field_values(self.audit)
            kept["attack"] = [attacks.describe(each) for each in self.attack]
        kept["defense"] = [defenses.describe(each) for each in self.defense]
        return kept

    @classmethod
    def read(cls, command: Command, given: Given) -> Self:
        """The configuration of a command. Whatever is wrong with it is told at once, in one line."""
        data = read_toml(given.config) if given.config else {}
        flags = {s.key: s.flag for s in SETTINGS if s.key in given.values}
        return cls.checked(command, _merged(data, given.values), given.config, flags)

    @classmethod
    def checked(
        cls, command: Command, data: dict[str, Any], path: Path | None = None, flags: Mapping[str, str] | None = None
    ) -> Self:
        """The same from plain data. `flags` names the keys that were given as options."""
        wrong, rest = _unknown_keys({**data, "command": command})
        wrong += _truth_values(rest)
        try:
            made = cls.model_validate(rest)
        except pydantic.ValidationError as error:
            wrong.append(_with_flags(problems(error), flags or {}))
        if wrong:
            raise FedveilError(f"{path}: {'; '.join(wrong)}" if path else "; ".join(wrong))
        return made


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FedveilError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # also text that is not UTF-8, and numbers of thousands of digits
        raise FedveilError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise FedveilError(f"{path} is not valid TOML: it is nested too deeply") from None
    wrong = _unusable(found)
    if wrong:
        raise FedveilError(f"{path} is not valid TOML: {wrong}")
    return found


def _unusable(value: Any, depth: int = 0) -> str | None:
    """What TOML allows or leaves open, and no configuration needs."""
    if depth > DEEPEST:
        return "it is nested too deeply"
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return next((wrong for part in inside if (wrong := _unusable(part, depth + 1))), None)
    huge = isinstance(value, int) and not -(2**63) <= value < 2**63
    return "a number has more than 64 bits" if huge else None


def _built(value: Any, kind: Literal["defense", "attack"]) -> list[Any]:
    """The declared things behind specs and tables; of a defense spec, the list of its chain."""
    items = value if isinstance(value, list | tuple) else [value]
    made, wrong = [], []
    for item in items:
        try:
            if isinstance(item, str):
                made.append(Chain.of(item).defenses if kind == "defense" else attacks.parse(item))
            elif isinstance(item, dict) and isinstance(item.get("name"), str):
                registry = defenses if kind == "defense" else attacks
                built = registry.build(**{str(key).replace("-", "_"): part for key, part in item.items()})
                made.append((built,) if kind == "defense" else built)
            elif isinstance(item, Defense | Attack):
                made.append((item,) if kind == "defense" else item)
            else:
                wrong.append(f'{kind} must be "name:field=value,...", or a table with a name (got {item!r})')
        except FedveilError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    return made


def _merged(data: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The file's values with those of the command line over them."""
    merged = dict(data)
    for key, value in given.items():
        section, dot, name = key.partition(".")
        if dot:
            inside = merged.get(section, {})
            if isinstance(inside, dict):  # anything else is refused later, as what it is
                merged[section] = {**inside, name: value}
        else:
            merged[key] = value
    return merged


def _sections() -> dict[str, list[str]]:
    return {
        "task": list(TaskSection.model_fields),
        "federation": [field.name for field in dataclasses.fields(FederationSettings)],
        "audit": [field.name for field in dataclasses.fields(AuditSettings)],
    }


def _unknown_keys(data: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """What no configuration has, with the nearest right key; and the data without it."""
    sections = _sections()
    top = [field.alias or name for name, field in Config.model_fields.items() if name != "trains"]
    known = [*top, *(f"{section}.{name}" for section, names in sections.items() for name in names)]
    wrong, rest = [], {}
    for key, value in data.items():
        if key not in top:
            wrong.append(_unknown(key, known))
        elif key in sections and isinstance(value, dict):
            wrong += [_unknown(f"{key}.{name}", known) for name in value if name not in sections[key]]
            rest[key] = {name: part for name, part in value.items() if name in sections[key]}
        else:
            rest[key] = value
    return wrong, rest


def _unknown(key: str, known: list[str]) -> str:
    """A key may be misspelled, or right but in the wrong section."""
    section, _, name = key.rpartition(".")
    names = {right: right.rpartition(".")[2] for right in known}
    near = [right for right in known if names[right] == name.replace("-", "_")]
    for group in ([r for r in known if r.rpartition(".")[0] == section], known):
        close = difflib.get_close_matches(name, [names[right] for right in group], n=1, cutoff=0.6)
        near += [right for right in group if names[right] in close]
    inside = ", ".join(right for right in known if right.rpartition(".")[0] == section)
    return f"unknown key '{key}': " + (f"did you mean '{near[0]}'?" if near else f"there are: {inside}")


def _truth_values(data: Mapping[str, Any]) -> list[str]:
    """True and false would pass for the numbers 1 and 0."""
    pairs = [("seed", data.get("seed"))]
    for section in ("task", "federation", "audit"):
        inside = data.get(section)
        pairs += [(f"{section}.{name}", value) for name, value in inside.items()] if isinstance(inside, dict) else []
    return [f"{key} must not be {str(value).lower()}" for key, value in pairs if isinstance(value, bool)]


def _with_flags(text: str, flags: Mapping[str, str]) -> str:
    """Name a value that came from the command line as it was given there."""
    for key, flag in flags.items():
        text = re.sub(rf"(^|; ){re.escape(key)}(?=[. ])", rf"\g<1>{flag}", text)
    return text
