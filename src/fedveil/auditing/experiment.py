"""An experiment: what is trained, attacked and judged. Python, TOML files, the command line and studies share it."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedveil.attacks.base import Attack
from fedveil.attacks.link import LinkTest
from fedveil.auditing.again import OWN
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.suites import DEFAULT, Suite, suite_named
from fedveil.clients.engine import BACKENDS, Backend
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError, unknown_name
from fedveil.federation.settings import FederationSettings
from fedveil.fields import Count, field_values, problems
from fedveil.registry import attacks, datasets, defenses, models
from fedveil.tasks.own_files import Reference, is_reference
from fedveil.tasks.partition import partitions
from fedveil.tasks.splits import read_split
from fedveil.tasks.task import Buffers, Task, task

DEEPEST = 20  # levels of tables and lists inside each other
# Keys of the file that say where and how the command line shows a run, and not what it is.
SHOWING = ("command", "workers", "out", "overwrite", "json", "quiet", "fail_if", "store")


class TaskSettings(BaseModel):
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


class Experiment(BaseModel):
    """All that decides what an audit finds; the keys of the TOML file are these fields.

    ```python
    experiment = fedveil.Experiment(task={"data": "digits", "model": "mlp"}, defense="gradient-dropout:keep=0.8")
    result = fedveil.audit(experiment)
    ```

    task: named settings, or a `Task` of one's own, which no file can hold.
    suite, attack: attacks by the name of a suite (see `SUITES`), or one by one; without either, the suite "standard".
    own_auxiliary: examples of one's own that attackers may learn from, in place of what `audit.auxiliary` names.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, populate_by_name=True)
    not_keys: ClassVar[tuple[str, ...]] = ("trains", "own_auxiliary")

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "cpu"
    backend: Backend = "auto"
    task: TaskSettings | Task = TaskSettings()
    federation: FederationSettings = FederationSettings()
    audit: AuditSettings = AuditSettings()
    defense: tuple[Defense, ...] = ()
    suite: str | None = None
    attack: tuple[Attack, ...] = ()
    own_auxiliary: Any = Field(default=None, exclude=True)
    trains: bool = Field(default=True, exclude=True)  # in the file, rounds = 0 says no

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except pydantic.ValidationError as error:
            raise FedveilError(problems(error)) from None

    # ---- reading ---------------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The experiment of a TOML file; whatever is wrong with it is told at once, in one line."""
        found = read_toml(Path(path))
        return cls.checked({key: value for key, value in found.items() if key not in SHOWING}, Path(path))

    @classmethod
    def checked(cls, data: Mapping[str, Any], path: Path | None = None) -> Self:
        """The same from plain data."""
        wrong, rest = cls._unknown_keys(data)
        wrong += _truth_values(rest)
        try:
            made = cls(**rest)
        except FedveilError as error:
            wrong.append(str(error))
        if wrong:
            raise FedveilError(f"{path}: {'; '.join(wrong)}" if path else "; ".join(wrong))
        return made

    @classmethod
    def _unknown_keys(cls, data: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """What no configuration has, with the nearest right key; and the data without it."""
        sections = {
            "task": list(TaskSettings.model_fields),
            "federation": [field.name for field in dataclasses.fields(FederationSettings)],
            "audit": [field.name for field in dataclasses.fields(AuditSettings)],
        }
        top = [field.alias or name for name, field in cls.model_fields.items() if name not in cls.not_keys]
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

    @model_validator(mode="before")
    @classmethod
    def _no_rounds(cls, data: dict[str, Any]) -> dict[str, Any]:
        federation = data.get("federation")
        if data.get("command") != "train" and isinstance(federation, dict) and federation.get("rounds") == 0:
            # The protocol, batch and rate still decide what an update is.
            rest = {key: value for key, value in federation.items() if key not in ("rounds", "record_rounds")}
            return {**data, "federation": rest, "trains": False}
        return data

    @model_validator(mode="before")
    @classmethod
    def _suite_or_attacks(cls, data: dict[str, Any]) -> dict[str, Any]:
        named, suite = data.get("attack") is not None, data.get("suite")
        if named and suite is not None:
            raise ValueError("name a suite or attacks, not both (suite, attack)")
        return data if named or suite is not None else {**data, "suite": DEFAULT}

    @field_validator("suite")
    @classmethod
    def _suite(cls, value: str | None) -> str | None:
        try:
            return value if value is None else suite_named(value).name
        except FedveilError as error:
            raise ValueError(str(error)) from None

    @field_validator("backend", mode="before")
    @classmethod
    def _backend(cls, value: Any) -> Any:
        if value not in BACKENDS:
            raise ValueError(str(unknown_name("backend", str(value), BACKENDS)))
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        try:
            torch.zeros(1, device=value).item()  # read back: some devices hold no numbers
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
            reason = "there is no such kind" if reason.startswith("Expected one of") else reason
            raise ValueError(f"device '{value}' cannot be used here ({reason}): use cpu") from None
        return value

    @field_validator("defense", mode="before")
    @classmethod
    def _defenses(cls, value: Any) -> Any:
        found = [each for part in _built(value, "defense") for each in part]
        try:
            return Chain(tuple(found)).defenses
        except FedveilError as error:
            raise ValueError(str(error)) from None

    @field_validator("attack", mode="before")
    @classmethod
    def _attacks(cls, value: Any) -> Any:
        if value is None:
            return ()
        found = _built(value, "attack")
        names = [each.name for each in found]
        if not found:
            raise ValueError("an audit needs an attack: see `fedveil list attacks`")
        if len(set(names)) < len(names):
            raise ValueError(f"each attack can be named once in an audit (got {', '.join(names)})")
        return tuple(found)

    # ---- what it says ----------------------------------------------------------------------------------

    @property
    def chain(self) -> Chain:
        """The defenses as the federation runs them."""
        return Chain(self.defense)

    @property
    def attacks(self) -> tuple[Attack, ...]:
        """All attacks of the audit: those of the suite or those named, and the link test unless it is switched off.

        A suite asks who was a member unless that is switched off; attacks that are named ask what they ask.
        """
        if self.suite is not None:
            asked = {"reconstruct": True, "link": self.audit.link, "member": self.audit.member}
            return tuple(each for each in _members(suite_named(self.suite)) if asked[each.question])
        if not self.audit.link or any(each.question == "link" for each in self.attack):
            return self.attack
        return (*self.attack, LinkTest())

    @property
    def stops(self) -> bool:
        """Whether attacks on a question that is settled are left out."""
        return self.suite is not None and suite_named(self.suite).stops and self.audit.stop_when_settled

    def chain_at(self, number: int) -> Chain:
        """In a warm-up round there is no defense, and an attacker who knows it knows that too."""
        return Chain() if number <= self.federation.warmup_rounds else self.chain

    def build_task(self) -> Task:
        """Read the data and build the model, unless they are given."""
        if isinstance(self.task, Task):
            return self.task
        fields = {name: getattr(self.task, name) for name in TaskSettings.model_fields if name != "data"}
        return task(self.task.data, seed=self.seed, **fields)

    def described(self) -> dict[str, Any]:
        """All that decides what comes out, as plain data in the layout of the file."""
        federation = field_values(self.federation) | ({} if self.trains else {"rounds": 0})
        for name in ("record_rounds", "record_clients"):  # an audit captures what it attacks
            federation.pop(name)
        if isinstance(self.task, Task):
            described = dict(self.task.description)
        else:
            described = {name: str(v) if isinstance(v, Path) else v for name, v in dict(self.task).items()}
        return {
            "seed": self.seed,
            "device": self.device,
            "backend": self.backend,
            "task": described,
            "federation": federation,
            "audit": field_values(self.audit) | ({} if self.own_auxiliary is None else {"auxiliary": OWN}),
            **({"suite": self.suite} if self.suite else {"attack": [attacks.describe(each) for each in self.attack]}),
            "defense": [defenses.describe(each) for each in self.defense],
        }

    def with_rounds(self, rounds: Iterable[int]) -> Self:
        """The same, attacking other rounds."""
        return self.model_copy(update={"audit": dataclasses.replace(self.audit, rounds=tuple(rounds))})


def _members(suite: Suite) -> list[Attack]:
    """The attacks of a suite. A name that nobody registered is no reason to do without the others."""
    known = attacks.entries()
    return [attacks.parse(spec) for spec in suite.attacks if spec.partition(":")[0] in known]


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
    """The declared things behind names, specs, tables and instances; of a defense, the list of its chain."""
    items = value if isinstance(value, list | tuple) else [value]
    made, wrong = [], []
    for item in items:
        try:
            made.append(_one(item, kind))
        except FedveilError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    return made


def _one(item: Any, kind: Literal["defense", "attack"]) -> Any:
    if isinstance(item, dict) and isinstance(item.get("name"), str):
        registry = defenses if kind == "defense" else attacks
        built = registry.build(**{str(key).replace("-", "_"): part for key, part in item.items()})
        return (built,) if kind == "defense" else built
    if kind == "defense" and (item is None or isinstance(item, str | Defense | Chain)):
        return Chain.of(item).defenses
    if kind == "attack" and isinstance(item, str):
        return attacks.parse(item)
    if isinstance(item, type) and issubclass(item, Defense | Attack):
        raise FedveilError(f"{kind}: {item.__name__} is a class: write {item.__name__}()")
    if kind == "attack" and isinstance(item, Attack):
        if not hasattr(item, "__dataclass_fields__"):
            raise FedveilError(f"the class {type(item).__name__} is not declared: put @declared above it")
        return item
    raise FedveilError(f'{kind} must be "name:field=value,...", a table with a name, or an instance (got {item!r:.80})')


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
    switches = {f"audit.{field.name}" for field in dataclasses.fields(AuditSettings) if field.type in ("bool", bool)}
    pairs = [("seed", data.get("seed"))]
    for section in ("task", "federation", "audit"):
        inside = data.get(section)
        pairs += [(f"{section}.{name}", value) for name, value in inside.items()] if isinstance(inside, dict) else []
    wrong = [(key, value) for key, value in pairs if isinstance(value, bool) and key not in switches]
    return [f"{key} must not be {str(value).lower()}" for key, value in wrong]
