"""Plain data survives being written as TOML."""

from __future__ import annotations

import tomllib

from fedveil.toml import to_toml


def test_strings_survive_toml() -> None:
    data = {"a": 'quo"te\\', "b": "tab\tnew\nline\x7f ε", "c": [1, 2.5e-9, True, "x"], "d": {"e": -1}}
    assert tomllib.loads(to_toml(data)) == data


def test_any_name_can_be_a_key() -> None:
    data = {"a b": 1, 'quo"te\n': {"": 2, "ε": [3]}, "[x]": [{"=": "y"}]}
    assert tomllib.loads(to_toml(data)) == data
