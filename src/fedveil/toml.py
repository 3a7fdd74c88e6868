"""Write plain data as TOML, the format of configuration files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def to_toml(data: Mapping[str, Any]) -> str:
    """Plain data of a configuration as a TOML file: values first, then sections, then lists of sections.

    >>> print(to_toml({"seed": 1, "limit": None, "task": {"data": "digits"}, "defense": [{"name": "clip"}]}), end="")
    seed = 1
    <BLANKLINE>
    [task]
    data = "digits"
    <BLANKLINE>
    [[defense]]
    name = "clip"
    """
    lines = _pairs({key: value for key, value in data.items() if not _is_section(value)})
    for key, value in data.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(key)}]", *_pairs(value)]
        elif _is_section(value):
            for item in value:
                lines += ["", f"[[{_key(key)}]]", *_pairs(item)]
    return "\n".join(lines) + "\n"


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_toml(value)}" for key, value in table.items() if value is not None]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(_pairs(value)) + "}"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
