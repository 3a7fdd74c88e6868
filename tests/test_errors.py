"""Messages are one printable line of bounded length, whatever a file put into them."""

import pickle

from fedveil.errors import FedveilError


def test_a_message_is_one_printable_line():
    said = str(FedveilError("a\nb\x1b[31m\tc"))
    assert said.isprintable()
    assert said == "a b\\x1b[31m c"
    assert str(FedveilError("plain, with 'quotes' and ε")) == "plain, with 'quotes' and ε"


def test_a_message_is_bounded_and_tells_how_long_it_was():
    said = str(FedveilError("x" * 80_000))
    assert len(said) < 1600
    assert said.endswith("… (80,000 letters)")


def test_errors_travel_between_processes():
    assert str(pickle.loads(pickle.dumps(FedveilError("told")))) == "told"
