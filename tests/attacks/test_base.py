"""The base of named attacks."""

import pytest

from fedveil.attacks.base import Attack
from fedveil.errors import FedveilError
from fedveil.fields import declared


def test_an_attack_without_choices_says_what_is_missing():
    @declared
    class Idle(Attack):
        pass

    with pytest.raises(FedveilError, match="the attack Idle says nothing of what it does: override choices"):
        Idle().choices()
