"""The configuration of a run: an experiment, and where and how the command line shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from fedveil.auditing.experiment import Experiment, TaskSettings, read_toml
from fedveil.cli.options import SETTINGS, Command, Given
from fedveil.errors import FedveilError, unknown_name
from fedveil.fields import field_values
from fedveil.workers import Workers

FINDINGS = ("exposed", "partly-exposed", "not-judged")  # the status of an audit that --fail-if can name


class Config(Experiment):
    """Everything that a run is made of; the keys of the TOML file are these fields."""

    command: Literal["audit", "train"] = "audit"
    task: TaskSettings = TaskSettings()  # by name: a file holds no objects
    workers: str = "auto"
    out: Path | None = None
    store: Path | None = None
    overwrite: bool = False
    as_json: bool = Field(default=False, alias="json")
    quiet: bool = False
    fail_if: tuple[str, ...] = ()

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

    def pool(self) -> Workers:
        """The processes that share the work."""
        return Workers.of(self.workers)

    def kept(self) -> dict[str, Any]:
        """All that decides what comes out, as plain data in the layout of the file."""
        described = self.described()
        if self.command == "train":
            described["federation"] = field_values(self.federation)
            described = {key: value for key, value in described.items() if key not in ("audit", "attack", "suite")}
        return {"command": self.command, **described}

    @classmethod
    def load(cls, command: Command, given: Given) -> Self:
        """The configuration of a command. Whatever is wrong with it is told at once, in one line."""
        data = read_toml(given.config) if given.config else {}
        flags = {s.key: s.flag for s in SETTINGS if s.key in given.values}
        merged = {**_merged(data, given.values), "command": command}
        try:
            return cls.checked(merged, given.config)
        except FedveilError as error:
            raise FedveilError(_with_flags(str(error), flags)) from None


def _merged(data: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The file's values with those of the command line over them."""
    either = {"attack", "suite"}
    merged = {key: value for key, value in data.items() if not (key in either and either & given.keys())}
    for key, value in given.items():
        section, dot, name = key.partition(".")
        if dot:
            inside = merged.get(section, {})
            if isinstance(inside, dict):  # anything else is refused later, as what it is
                merged[section] = {**inside, name: value}
        else:
            merged[key] = value
    return merged


def _with_flags(text: str, flags: Mapping[str, str]) -> str:
    """Name a value that came from the command line as it was given there."""
    for key, flag in flags.items():
        text = re.sub(rf"(^|; |: ){re.escape(key)}(?=[. ])", rf"\g<1>{flag}", text)
    return text
