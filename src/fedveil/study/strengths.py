"""The strengths at which a defense is compared: its own axis, from weak to strong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.defenses.base import Defense
from fedveil.defenses.chain import BETWEEN, Chain
from fedveil.errors import FedveilError
from fedveil.fields import parse_spec, split_commas
from fedveil.registry import defenses

ALL = "all"  # in the place of names: every registered defense


@dataclass(frozen=True)
class Setting:
    """A defense, or a chain, at one strength."""

    family: str  # as it was asked for: all strengths of one defense belong together
    chain: Chain
    moved: tuple[tuple[str, float], ...] = ()  # the fields that the sweep sets; empty: compared as it is

    @property
    def label(self) -> str:
        """What tells it from the others of its family: "keep=0.5"."""
        return ", ".join(f"{name}={value:.4g}" for name, value in self.moved)


def settings_of(asked: str | Defense | Chain, count: int) -> list[Setting]:
    """A defense at so many strengths; all defenses of a chain get stronger together.

    One whose strength is set already ("gradient-dropout:keep=0.8"), and one that declares no axis, is taken as it is.

    >>> [setting.label for setting in settings_of("gradient-dropout:sigma=0.01", 3)]
    ['keep=0.95', 'keep=0.525', 'keep=0.1']
    >>> [str(setting.chain) for setting in settings_of("gradient-dropout:keep=0.5+clip", 2)]
    ['gradient-dropout:keep=0.5+clip:norm=10', 'gradient-dropout:keep=0.5+clip:norm=0.01']
    """
    if count < 1:
        raise FedveilError(f"the number of strengths must be 1 or more, not {count}")
    members = _members(asked)
    family = asked if isinstance(asked, str) else str(Chain(tuple(defense for defense, _ in members)))
    axes = [_axis(defense, count, fixed) for defense, fixed in members]
    if not any(axes):
        return [Setting(family, Chain(tuple(defense for defense, _ in members)))]
    found = []
    for place in range(count):
        moved, made = [], []
        for (defense, _), values in zip(members, axes, strict=True):
            if values and defense.strength is not None:
                moved.append((defense.strength.field, values[place]))
                made.append(dataclasses.replace(defense, **{defense.strength.field: values[place]}))  # type: ignore[type-var]
            else:
                made.append(defense)
        found.append(Setting(family, Chain(tuple(made)), tuple(moved)))
    return found


def families(text: str) -> list[str]:
    """The defenses that a list on the command line names: commas between them, fields may have commas too.

    >>> families("fedem,gradient-dropout:keep=0.8,sigma=0.01,clip+gaussian-noise")
    ['fedem', 'gradient-dropout:keep=0.8,sigma=0.01', 'clip+gaussian-noise']
    """
    found: list[str] = []
    for part in split_commas(text):
        name = re.split(r"[:+]", part.strip())[0]
        if found and "=" in name and "=" not in found[-1].partition(":")[0]:
            found[-1] += f",{part}"  # one more field of the last
        elif part.strip():
            found.append(part.strip())
    return found


def every_defense() -> list[str]:
    """All registered defenses by name."""
    return [name for name in defenses.entries() if name != "none"]


def _members(asked: str | Defense | Chain) -> list[tuple[Defense, bool]]:
    """The defenses of a chain, and whether the strength of each is set already."""
    if isinstance(asked, str):
        specs = [part.strip() for part in re.split(BETWEEN, asked)]
        built: list[Defense] = [defenses.parse(spec) for spec in specs]
        named = [set(parse_spec(spec)[1]) for spec in specs]
        return [(each, _field(each) in fields) for each, fields in zip(built, named, strict=True)]
    chain = Chain.of(asked)
    return [(each, _is_set(each)) for each in chain.defenses]


def _axis(defense: Defense, count: int, fixed: bool) -> Sequence[float]:
    return [] if fixed or defense.strength is None else defense.strength.values(count)


def _field(defense: Defense) -> str:
    return "" if defense.strength is None else defense.strength.field


def _is_set(defense: Defense) -> bool:
    """Whether an instance has another strength than the default one."""
    defaults = {field.name: field.default for field in dataclasses.fields(defense)}  # type: ignore[arg-type]
    name = _field(defense)
    return bool(name) and getattr(defense, name) != defaults[name]
