"""Messages are one printable line of bounded length, whatever a file put into them."""

import pickle

import pytest

from fedveil.errors import FedveilError, one_line


def test_a_message_is_one_printable_line():
    said = str(FedveilError("a\nb\x1b[31m\tc"))
    assert said.isprintable()
    assert said == "a b\\x1b[31m c"
    assert str(FedveilError("plain, with 'quotes' and ε")) == "plain, with 'quotes' and ε"


def test_a_message_is_bounded_and_tells_how_long_it_was():
    said = str(FedveilError("x" * 80_000))
    assert len(said) < 1600
    assert said.endswith("… (80,000 characters)")


def test_errors_travel_between_processes():
    assert str(pickle.loads(pickle.dumps(FedveilError("told")))) == "told"


@pytest.mark.parametrize(
    "said, plain, typed",
    [
        (RuntimeError("\n shapes differ \nException raised from"), "shapes differ", "RuntimeError: shapes differ"),
        (KeyError(), "KeyError", "KeyError"),
        (FedveilError("ours"), "ours", "ours"),
        ("404 gone\x1b[31m", "404 gone\\x1b[31m", "404 gone\\x1b[31m"),
        ("", "", ""),
    ],
)
def test_what_others_say_is_quoted_in_one_line(said, plain, typed):
    assert one_line(said) == plain
    assert one_line(said, typed=True) == typed


def test_a_quote_is_short():
    assert one_line(ValueError("x" * 201)) == "x" * 200 + "…"
    assert one_line(ValueError("x" * 200)) == "x" * 200
