"""The base of named attacks, and what is refused of a stranger's recipe."""

from dataclasses import replace

import pytest

from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.errors import FedveilError
from fedveil.fields import declared


def attack_of(make):
    @declared
    class Stranger(GradientMatching):
        def recipe(self):
            return make()

    return Stranger()


def test_a_matching_attack_without_a_recipe_says_what_is_missing():
    @declared
    class Idle(GradientMatching):
        pass

    with pytest.raises(FedveilError, match="Idle does not define `recipe`, which says how it attacks"):
        Idle().checked_recipe()


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: "cosine", "must return a `Recipe`, not 'cosine'"),
        (lambda: 1 / 0, "fails: ZeroDivisionError"),
        (lambda: Recipe(match="l3"), "match must be one of l2, "),
        (lambda: Recipe(labels="asked"), "labels must be one of known, idlg"),
        (lambda: Recipe(tries=()), "at least one try"),
        (lambda: Recipe(tries=((),)), "at least one phase"),
        (lambda: Recipe(tries=((Phase(0),),)), "steps must be a whole number of at least 1"),
        (lambda: Recipe(tries=((Phase(True),),)), "steps must be a whole number of at least 1"),
        (lambda: Recipe(tries=((Phase(3),), (Phase(4),))), "all tries must have as many steps"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_in_one_line(make, told):
    with pytest.raises(FedveilError, match=told):
        attack_of(make).checked_recipe()


@pytest.mark.parametrize(
    "labels, needed",
    [("known", {"labels"}), ("idlg", {"batch of one"}), ("optimized", {"classes"}), ("recovered", set())],
)
def test_needs_follow_from_where_labels_come_from(labels, needed):
    assert attack_of(lambda: replace(Recipe(), labels=labels)).needs == needed
