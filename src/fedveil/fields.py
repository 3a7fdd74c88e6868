"""Declared classes: small frozen dataclasses with validated fields.

A defense, an attack, a data set and a model are all *declared*: a class with typed, validated, keyword-only
fields and nothing computed in its constructor. The same fields then serve Python, TOML files, the command
line and the report.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
from pydantic import Field

from fedveil.errors import FedveilError, shortened

T = TypeVar("T")

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
KeepProbability = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
LARGEST = 3.4e38  # the largest float32; a larger number would be infinite in an update
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
# Repetitions of something as slow as a gradient for every shared gradient: with more, no run would ever end.
Repeats = Annotated[int, Field(ge=1, le=10_000)]
RepeatsOrZero = Annotated[int, Field(ge=0, le=10_000)]


@dataclass_transform(kw_only_default=True, frozen_default=True)
def declared(cls: type[T]) -> type[T]:
    """Class decorator: a frozen, keyword-only dataclass whose fields are validated on construction.

    A bad or unknown field raises one `FedveilError` that lists every problem at once.

    >>> @declared
    ... class Coin:
    ...     heads: Probability = 0.5
    >>> Coin(heads=0.25)
    Coin(heads=0.25)
    >>> Coin(heads=2, edge=1)
    Traceback (most recent call last):
    fedveil.errors.FedveilError: Coin: heads must be less than or equal to 1 (got 2); no field 'edge' (fields: heads)
    """
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    made = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls)
    construct: Callable[..., None] = made.__init__

    def init(self: Any, *arguments: Any, **fields: Any) -> None:
        # Each class translates the errors of its own constructor, so that the message has the name of the subclass.
        try:
            construct(self, *arguments, **fields)
        except pydantic.ValidationError as error:
            raise FedveilError(f"{cls.__name__}: {problems(error, made)}") from None

    init.__doc__ = None
    made.__init__ = init  # type: ignore[method-assign]
    return made  # type: ignore[return-value]


def problems(error: pydantic.ValidationError, cls: type | None = None) -> str:
    """All problems of a pydantic error, in one line of plain words."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            known = f" (fields: {', '.join(field_names(cls)) or 'none'})" if cls else ""
            lines.append(f"no field '{where}'{known}")
        elif item["type"] == "missing":
            registered = vars(cls).get("name") if cls else None  # not inherited: a base may have a default name
            lines.append(f"{where} is required" + (f", as in {registered}:{where}=…" if registered else ""))
        elif item["type"] == "value_error":
            lines.append(str(item["msg"]).removeprefix("Value error, "))
        else:
            what = re.sub(r"^Input should be", "must be", item["msg"]).partition(", unable to parse")[0]
            what = re.sub(r"\d{16,}", lambda number: f"{float(number[0]):g}", what)
            lines.append(f"{where} {what} (got {shortened(repr(item['input']), 100)})")
    return "; ".join(lines)


def field_names(cls: type) -> list[str]:
    """The names of a declared class's fields, in order."""
    return [field.name for field in dataclasses.fields(cls)]


def field_values(thing: object) -> dict[str, Any]:
    """The fields of a declared object with their values; nested objects become dicts."""
    return dataclasses.asdict(thing)  # type: ignore[call-overload, no-any-return]


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Read `name` or `name:field=value,field=value` as the command line writes it.

    Values are TOML scalars or lists; a bare word is a string and `8/255` is a fraction. A string that would
    otherwise be read as something else needs quotes.

    >>> parse_spec("gradient-dropout:keep=0.8,sigma=8/255")
    ('gradient-dropout', {'keep': 0.8, 'sigma': 0.03137254901960784})
    >>> parse_spec("resnet18:norm=group,stages=[1,2]")
    ('resnet18', {'norm': 'group', 'stages': [1, 2]})
    >>> parse_spec('csv:path="a,b.csv",columns=[age,sex]')
    ('csv', {'path': 'a,b.csv', 'columns': ['age', 'sex']})
    """
    name, _, rest = text.strip().partition(":")
    if re.search(r"[\s,=]", name.strip()):
        raise FedveilError(f"cannot read '{text}': a colon stands before the fields, name:field=value,field=value")
    fields: dict[str, Any] = {}
    for part in split_commas(rest) if rest.strip() else []:
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key or not value.strip():
            raise FedveilError(f"cannot read '{part}' in '{text}': write name:field=value,field=value")
        if key in fields:
            raise FedveilError(f"'{key}' is given twice in '{text}'")
        try:
            fields[key] = parse_value(value.strip())
        except RecursionError:
            raise FedveilError(f"cannot read '{part:.40}…': it is nested too deeply") from None
    return name.strip(), fields


def split_commas(text: str) -> list[str]:
    """Split at commas that are not inside quotes or brackets."""
    parts, depth, quote, escaped = [""], 0, "", False
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += letter
        if quote:
            ends = letter == quote and not escaped
            escaped = quote == '"' and letter == "\\" and not escaped
            quote = "" if ends else quote
        elif letter in "\"'" and re.search(r"[=\[,]\s*.$", "," + parts[-1]):
            quote = letter  # only at the start of a value, because a word may contain an apostrophe
        else:
            depth = max(0, depth + (letter == "[") - (letter == "]"))
    return parts


def parse_value(text: str) -> Any:
    """One value of a spec: a TOML scalar or list, a fraction, or otherwise the bare string."""
    fraction = re.fullmatch(r"([-+]?[\d.]+)\s*/\s*([\d.]+)", text)
    try:
        if fraction:
            return float(fraction[1]) / float(fraction[2])
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, ValueError, ZeroDivisionError):
        if text.startswith("[") and text.endswith("]"):  # a list of bare words or fractions
            return [parse_value(item.strip()) for item in split_commas(text[1:-1])]
        return text
