"""Declared classes: validated, frozen, all problems at once; and the command line's way to write them."""

import dataclasses
import pickle
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.defenses.base import Defense
from fedveil.errors import FedveilError
from fedveil.fields import (
    Count,
    CountOrZero,
    KeepProbability,
    NonNegative,
    Positive,
    Probability,
    declared,
    field_names,
    field_values,
    parse_spec,
    parse_value,
)
from fedveil.registry import datasets


@declared
class Coin:
    """A coin."""

    kind = "metal"  # not a field: it has no type
    heads: Probability = 0.5
    tosses: Count = 1


@declared
class Dice(Coin):
    sides: Count


@declared
class Bag:
    coin: Coin = Coin()
    names: tuple[str, ...] = ()
    mode: Literal["open", "closed"] = "open"
    where: Path | None = None


def test_declared_things_are_frozen_equal_and_keyword_only():
    coin = Coin(heads=0.25)
    assert coin == Coin(heads=0.25) != Coin()
    assert hash(coin) == hash(Coin(heads=0.25))
    assert repr(coin) == "Coin(heads=0.25, tosses=1)"
    assert pickle.loads(pickle.dumps(coin)) == coin
    assert dataclasses.replace(coin, tosses=2) == Coin(heads=0.25, tosses=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        coin.heads = 1
    with pytest.raises(FedveilError, match="Coin: "):
        Coin(0.5)


def test_replacing_validates_too():
    with pytest.raises(FedveilError, match="Coin: heads must be"):
        dataclasses.replace(Coin(), heads=3)


def test_every_problem_is_named_at_once():
    with pytest.raises(FedveilError) as error:
        Dice(heads=2, tosses="many", edge=1)
    line = str(error.value)
    assert line.startswith("Dice: ")
    for part in (
        "heads must be less than or equal to 1 (got 2)",
        "tosses must be a valid integer",
        "(got 'many')",
        "sides is required",
        "no field 'edge' (fields: heads, tosses, sides)",
    ):
        assert part in line
    assert "\n" not in line


def test_a_missing_field_is_spelled_as_the_command_line_writes_it():
    with pytest.raises(FedveilError, match=r"^ImageFolder: path is required, as in image-folder:path=…$"):
        datasets.build("image-folder")

    @declared
    class Own(Defense):  # has no name of its own
        strength_of_mine: float

    with pytest.raises(FedveilError, match=r"^Own: strength_of_mine is required$"):
        Own()


@pytest.mark.parametrize(
    "kind, good, bad",
    [
        (Probability, [0, 0.5, 1], [-0.1, 1.1]),
        (KeepProbability, [0.1, 1], [0, 1.1]),
        (Positive, [1e-300, 5], [0, -1]),
        (NonNegative, [0, 5], [-1e-9]),
        (Count, [1, 10**30], [0, -1, 1.5]),
        (CountOrZero, [0, 1], [-1, 0.5]),
    ],
    ids=["Probability", "KeepProbability", "Positive", "NonNegative", "Count", "CountOrZero"],
)
def test_number_types(kind, good, bad):
    @declared
    class Thing:
        value: kind

    for value in good:
        assert Thing(value=value).value == value
    for value in [*bad, float("nan"), float("inf"), "word", None]:
        with pytest.raises(FedveilError, match="Thing: value must be"):
            Thing(value=value)


def test_checks_across_fields_read_as_one_line():
    @declared
    class Range:
        low: float = 0
        high: float = 1

        def __post_init__(self):
            if self.low > self.high:
                raise ValueError("low must not be above high")

    with pytest.raises(FedveilError, match=r"^Range: low must not be above high$"):
        Range(low=2)


def test_names_and_values():
    assert field_names(Dice) == ["heads", "tosses", "sides"]
    assert field_values(Bag(coin=Coin(heads=1), names=("a",))) == {
        "coin": {"heads": 1.0, "tosses": 1},
        "names": ("a",),
        "mode": "open",
        "where": None,
    }


@pytest.mark.parametrize(
    "text, name, fields",
    [
        ("clip", "clip", {}),
        (" clip : ", "clip", {}),
        ("clip:norm=1", "clip", {"norm": 1}),
        ("clip:norm=1e-3 , per-layer = true", "clip", {"norm": 0.001, "per_layer": True}),
        ("x:a=8/255,b=-1/4", "x", {"a": 8 / 255, "b": -0.25}),
        ("x:a=1/0", "x", {"a": "1/0"}),
        ("x:a=data/file.csv", "x", {"a": "data/file.csv"}),
        ("x:a=[],b=[1,2],c=[[1,2],[3]]", "x", {"a": [], "b": [1, 2], "c": [[1, 2], [3]]}),
        ("x:a=[p,q],b=[8/255]", "x", {"a": ["p", "q"], "b": [8 / 255]}),
        ('x:a="1",b="c,d",e=["f,g","]"]', "x", {"a": "1", "b": "c,d", "e": ["f,g", "]"]}),
        (r'x:a="say \"hi, you\"",b=1', "x", {"a": 'say "hi, you"', "b": 1}),
        ("x:a=it's,b=2", "x", {"a": "it's", "b": 2}),
        ("x:a=k=v", "x", {"a": "k=v"}),
        ("x:a=http://h:1", "x", {"a": "http://h:1"}),
    ],
)
def test_parse_spec(text, name, fields):
    assert parse_spec(text) == (name, fields)


@pytest.mark.parametrize("text", ["x:a", "x:=1", "x:a=", "x:a=1,", "x:a=1,,b=2", "x:a=1,2", "x:,"])
def test_specs_that_cannot_be_read(text):
    with pytest.raises(FedveilError, match=r"cannot read .* write name:field=value"):
        parse_spec(text)


def test_a_field_given_twice():
    with pytest.raises(FedveilError, match="'a' is given twice"):
        parse_spec("x:a=1,a=2")


@settings(deadline=None)
@given(st.text())
def test_any_text_parses_or_says_why(text):
    try:
        name, fields = parse_spec(text)
    except FedveilError:
        return
    assert name == text.strip().partition(":")[0].strip()
    assert isinstance(fields, dict)


@settings(deadline=None)
@given(st.integers() | st.floats(allow_nan=False) | st.booleans())
def test_numbers_as_python_writes_them(value):
    text = str(value).lower()
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)
