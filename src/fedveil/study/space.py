"""What tuning may change: the strength of a defense, and fields given as a range, such as `sigma=1e-3..1e-1`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from fedveil.defenses.base import Defense
from fedveil.defenses.chain import BETWEEN, Chain
from fedveil.errors import FedveilError
from fedveil.fields import parse_spec
from fedveil.registry import defenses

RANGE = re.compile(r"([-+\d.eE]+)\.\.([-+\d.eE]+)")
WIDE = 20.0  # ends this many times apart are searched by their logarithm
FINE = 4  # digits of a value that was searched for


class Suggests(Protocol):
    """What an Optuna trial offers."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...


@dataclass(frozen=True)
class Range:
    """A field and its ends; `rest`: searched by the logarithm of what is missing to 1."""

    defense: int  # its place in the chain
    field: str
    low: float
    high: float
    rest: bool = False

    def suggested(self, family: str, trial: Suggests) -> float:
        """A value of this field."""
        name = f"{family} {self.defense} {self.field}"
        if self.rest:
            return 1 - _rounded(trial.suggest_float(name, 1 - self.high, 1 - self.low, log=True))
        log = self.low > 0 and self.high / self.low >= WIDE
        return _rounded(trial.suggest_float(name, self.low, self.high, log=log))


@dataclass(frozen=True)
class Space:
    """One defense, or a chain, with the ranges of its fields."""

    family: str
    names: tuple[str, ...]
    fixed: tuple[dict[str, Any], ...]  # by defense
    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, spec: str) -> Space:
        """The space of a spec. Without a range of its own, a defense is searched along its strength.

        >>> Space.of("gradient-dropout:keep=0.1..0.95,sigma=1e-3..1e-1").ranges[1].high
        0.1
        >>> [each.field for each in Space.of("clip:norm=1+gaussian-noise").ranges]
        ['sigma']
        """
        names, fixed, ranges = list[str](), list[dict[str, Any]](), list[Range]()
        for place, part in enumerate(re.split(BETWEEN, spec)):
            name, fields = parse_spec(part)
            given = [_range(place, key, value, spec) for key, value in fields.items() if _is_range(value)]
            rest = {key: value for key, value in fields.items() if not _is_range(value)}
            axis = defenses.load(name).strength  # type: ignore[attr-defined]
            swept = axis is not None and axis.weak is not None and axis.strong is not None
            if not given and swept and axis.field not in rest:
                low, high = sorted((axis.weak, axis.strong))
                given = [Range(place, axis.field, low, high, rest=axis.steps == "rest")]
            names.append(name)
            fixed.append(rest)
            ranges += given
        made = cls(spec, tuple(names), tuple(fixed), tuple(ranges))
        for end in ("low", "high"):  # both ends must be settings that the defense takes
            made.built([getattr(each, end) for each in ranges])
        return made

    def suggested(self, trial: Suggests) -> Chain:
        """A chain from this space."""
        return self.built([each.suggested(self.family, trial) for each in self.ranges])

    def built(self, values: list[float]) -> Chain:
        """The chain with these values of its ranges."""
        fields = [dict(each) for each in self.fixed]
        for each, value in zip(self.ranges, values, strict=True):
            fields[each.defense][each.field] = value
        members: list[Defense] = [defenses.build(n, **f) for n, f in zip(self.names, fields, strict=True)]
        return Chain(tuple(members))


def _is_range(value: Any) -> bool:
    return isinstance(value, str) and RANGE.fullmatch(value) is not None


def _range(place: int, field: str, value: str, spec: str) -> Range:
    found = RANGE.fullmatch(value)
    assert found is not None
    try:
        low, high = float(found[1]), float(found[2])
    except ValueError:
        raise FedveilError(f"cannot read the range {field}={value} in '{spec}': write {field}=LOW..HIGH") from None
    if not low < high:
        raise FedveilError(f"the range {field}={value} in '{spec}' must go from the smaller to the larger number")
    return Range(place, field, low, high)


def _rounded(value: float) -> float:
    return float(f"{value:.{FINE}g}")
