"""What commands over many audits share: the options of an audit, and how far they are."""

from __future__ import annotations

import inspect
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.cli.options import RUN, SETTINGS, Given, Setting, keyword, parameter_of, read_values
from fedveil.errors import FedveilError

if TYPE_CHECKING:
    from fedveil.cli.config import Config
    from fedveil.study.running import Cell

LEFT_OUT = ("defense", "fail_if", "seed")  # options of an audit that a grid has in another form
Extra = tuple[str, Any, Any]  # name, default and annotation of an option that only this command has


@dataclass(frozen=True)
class Asked:
    """What was typed: the options of an audit as the file would have them, and the command's own."""

    given: Given
    own: dict[str, Any]
    command: str  # the whole of it, to type again

    def section(self, name: str) -> dict[str, Any]:
        """The command's own section of the configuration file, under what was typed."""
        from fedveil.auditing.experiment import read_toml

        found = read_toml(self.given.config).get(name, {}) if self.given.config else {}
        unknown = [key for key in found if key not in self.own] if isinstance(found, dict) else [name]
        if unknown:
            raise FedveilError(
                f"{self.given.config}: unknown key '{name}.{unknown[0]}': there are {', '.join(self.own)}"
            )
        return {key: found.get(key) if value is None else value for key, value in self.own.items()}

    def config(self, section: str, defaults: Mapping[str, Any]) -> Config:
        """The audit that all share; `defaults` stand where neither the file nor the command line says otherwise."""
        from fedveil.auditing.experiment import read_toml
        from fedveil.cli.config import Config

        found = read_toml(self.given.config) if self.given.config else {}
        values = dict(_flat({key: value for key, value in found.items() if key not in (section, "command")}))
        either = {"attack", "suite"}
        if either & self.given.values.keys():
            values = {key: value for key, value in values.items() if key not in either}
        values |= self.given.values
        taken = either & values.keys()
        values = {key: value for key, value in defaults.items() if not (taken and key in either)} | values
        try:
            return Config.load("audit", Given(values, None, False))
        except FedveilError as error:
            raise FedveilError(f"{self.given.config}: {error}" if self.given.config else str(error)) from None


def with_audit_settings(name: str, extras: Sequence[Extra]) -> Callable[[Callable[[Asked], int | None]], Any]:
    """Add the options of an audit, and others, to a command that takes an `Asked`."""
    chosen = [each for each in SETTINGS if each.command in (None, "audit") and each.key not in LEFT_OUT]

    def decorate(function: Callable[[Asked], int | None]) -> Callable[..., int | None]:
        def typed(*, config: Path | None = None, **options: Any) -> int | None:
            raw = {each: options[each.name] for each in chosen}
            own = {extra[0]: options[extra[0]] for extra in extras}
            given = Given(read_values({each.key: value for each, value in raw.items()}), config, False)
            return function(Asked(given, own, _spelled(name, raw, own, config)))

        file = typer.Option("--config", metavar="FILE", help="TOML file; options override it.", rich_help_panel=RUN)
        parameters = [keyword(*extra) for extra in extras] + [parameter_of(each) for each in chosen]
        parameters.append(keyword("config", None, Annotated[Path | None, file]))
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typed.__annotations__ = {}
        typed.__name__, typed.__doc__ = name, function.__doc__
        return typed

    return decorate


def _flat(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in found.items():
        if isinstance(value, dict):
            pairs += [(f"{key}.{name}", part) for name, part in value.items()]
        else:
            pairs.append((key, value))
    return pairs


def _spelled(name: str, raw: Mapping[Setting, Any], own: Mapping[str, Any], config: Path | None) -> str:
    """The command as it was typed, for whoever goes on with it."""
    words = ["fedveil", *name.split()]
    if config is not None:
        words += ["--config", str(config)]
    for option, value in own.items():
        words += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
    for setting, value in raw.items():
        if value is None or value == []:
            continue
        if setting.kind == "switch":
            yes, _, no = setting.flag.partition("/")
            words.append(yes if value else no)
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [setting.flag, str(each)]
    return shlex.join(words)


@dataclass
class Counter:
    """Tells after every audit how many are done, and how long the others will take at this pace."""

    seconds: Mapping[str, float]  # estimated, by cell
    quiet: bool
    _done: int = 0
    _estimated: float = 0.0
    _begun: float = field(default_factory=time.perf_counter)

    def __call__(self, cell: Cell, seconds: float) -> None:
        from fedveil.study.planning import duration

        self._done += 1
        self._estimated += self.seconds.get(cell.name, 0.0)
        left = sum(self.seconds.values()) - self._estimated
        pace = (time.perf_counter() - self._begun) / self._estimated if self._estimated > 0 else 1.0
        if not self.quiet:
            rest = f"; about {duration(left * pace)} to go" if self._done < len(self.seconds) else ""
            line = f"[{self._done}/{len(self.seconds)}] {cell.name}: {seconds:.1f} s{rest}"
            print(line, file=sys.stderr, flush=True)
