"""Plain data survives being written as TOML."""

from __future__ import annotations

import tomllib

from fedveil.toml import to_toml


def test_strings_survive_toml() -> None:
    data = {"a": 'quo"te\\', "b": "tab\tnew\nline\x7f ε", "c": [1, 2.5e-9, True, "x"], "d": {"e": -1}}
    assert tomllib.loads(to_toml(data)) == data
