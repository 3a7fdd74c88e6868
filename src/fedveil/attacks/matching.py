"""Attacks that match gradients: a recipe for the matching engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.matcher import match
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Recipe
from fedveil.attacks.scene import Scene
from fedveil.attacks.workload import attack_seconds, steps_in_all, victims_at_a_time
from fedveil.errors import FedveilError

_NEEDS = {
    "known": frozenset({"labels"}),
    "idlg": frozenset({"batch of one"}),
    "recovered": frozenset[str](),
    "optimized": frozenset({"classes"}),
}


class GradientMatching(Attack):
    """Rebuilds batches whose update looks like the observed one. A named attack overrides `recipe` only."""

    def recipe(self) -> Recipe:
        """This attack as choices of the matching engine."""
        raise NotImplementedError  # every matching attack defines its own

    @property
    def needs(self) -> frozenset[str]:
        """What follows from where the labels come from."""
        return _NEEDS[self.checked_recipe().labels]

    @property
    def labels_from(self) -> str:
        """As the recipe says."""
        return self.checked_recipe().labels

    def checked_recipe(self) -> Recipe:
        """The recipe, which may be a stranger's."""
        kind = type(self).__name__
        if type(self).recipe is GradientMatching.recipe:
            raise FedveilError(f"{kind} does not define `recipe`, which says how it attacks")
        try:
            found: object = self.recipe()
        except Exception as error:  # whatever a stranger's code raises is the reason
            raise FedveilError(f"{kind}.recipe fails: {type(error).__name__}: {error!s:.200}") from None
        if not isinstance(found, Recipe):
            raise FedveilError(f"{kind}.recipe must return a `Recipe`, not {found!r:.80}")
        wrong = found.wrong()
        if wrong:
            raise FedveilError(f"{kind}.recipe: {wrong}")
        return found

    def run(self, scene: Scene, fitted: Any = None) -> Reconstruction:
        """Match the update of every victim."""
        return match(Problem.of(scene, fitted), self.checked_recipe(), scene.bench)

    def estimate(self, scene: Scene) -> Work:
        """The steps of all tries and chunks, and what they take uncompiled."""
        problem, recipe = _outline(scene), self.checked_recipe()
        chunk = scene.bench.chunk
        return Work(steps_in_all(problem, recipe, chunk), attack_seconds(problem, recipe, chunk))

    def pieces(self, scene: Scene) -> list[Scene]:
        """As many victims as are stacked at a time."""
        chunk = scene.bench.chunk or victims_at_a_time(_outline(scene))
        scene = replace(scene, bench=replace(scene.bench, chunk=chunk))
        return [scene.rows(slice(start, start + chunk)) for start in range(0, scene.count, chunk)]


def _outline(scene: Scene) -> Problem:
    """The problem of one victim stands for its form: what a defense's knowledge is made of can take long."""
    one = Problem.of(scene.rows(slice(0, 1)))
    # As many victims as there are, without their numbers.
    return replace(one, target=one.target.rows([0] * scene.count))
