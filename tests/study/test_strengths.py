"""Every defense has an axis from weak to strong that its own fields accept."""

from __future__ import annotations

import itertools

import pytest

from fedveil.defenses import GradientDropout
from fedveil.defenses.base import Defense, Strength
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import defenses
from fedveil.study.strengths import every_defense, families, settings_of

NAMES = every_defense()


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_goes_from_weak_to_strong(name: str) -> None:
    found = settings_of(name, 5)
    assert len(found) == 5
    strength = defenses.load(name).strength
    values = [dict(setting.moved)[strength.field] for setting in found]
    ordered = sorted(values, reverse=strength.stronger == "down")
    assert values == ordered
    assert len(set(values)) == 5
    assert len({str(setting.chain) for setting in found}) == 5


def test_one_strength_is_the_middle_and_two_are_the_ends() -> None:
    axis = Strength("x", "up", weak=0.01, strong=100.0)
    assert axis.values(1) == [1.0]
    assert axis.values(2) == [0.01, 100.0]


def test_a_defense_without_an_axis_is_compared_as_it_is() -> None:
    @declared
    class Own(Defense):
        name = "own"

    (found,) = settings_of(Own(), 5)
    assert found.moved == ()
    assert found.chain.defenses == (Own(),)


def test_a_strength_that_is_set_stays() -> None:
    assert [str(each.chain) for each in settings_of("gradient-dropout:keep=0.8", 5)] == ["gradient-dropout"]
    assert len(settings_of(GradientDropout(keep=0.3), 5)) == 1
    assert len(settings_of(GradientDropout(sigma=0.3), 5)) == 5


def test_a_chain_gets_stronger_together() -> None:
    found = settings_of("clip+gaussian-noise", 3)
    assert [tuple(dict(each.moved)) for each in found] == [("norm", "sigma")] * 3
    for weak, strong in itertools.pairwise(found):
        assert dict(weak.moved)["norm"] > dict(strong.moved)["norm"]
        assert dict(weak.moved)["sigma"] < dict(strong.moved)["sigma"]


def test_lists_with_fields_are_told_apart() -> None:
    assert families("clip:norm=2,order=l1,fedem") == ["clip:norm=2,order=l1", "fedem"]
    assert families(" a , b:c=[1,2] ") == ["a", "b:c=[1,2]"]


def test_no_strength_is_refused() -> None:
    with pytest.raises(FedveilError, match="must be 1 or more, not 0"):
        settings_of("clip", 0)
