"""Attacks that match gradients: a recipe for the matching engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.cells import fitting
from fedveil.attacks.embeddings import fitting_text
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.informed import Tries, Try, chosen, tries_of
from fedveil.attacks.matcher import match
from fedveil.attacks.notes import Counter
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Recipe
from fedveil.attacks.scene import Scene
from fedveil.attacks.single_targets import check_readable
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

    revision = 4

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

    def under_noise(self) -> tuple[Recipe, ...]:
        """The same attack with stronger priors, the strongest first, for updates with noise of a known law."""
        return ()

    def besides(self) -> tuple[Recipe, ...]:
        """Other recipes with no weaker priors, for updates under a defense: whatever explains these best counts."""
        return ()

    def check(self, scene: Scene) -> None:
        """Refuse to read several labels or numbers off what does not tell them."""
        if scene.public.target.kind != "class" and self.labels_from in ("idlg", "recovered"):
            check_readable(self.problem_of(scene.rows(slice(0, 1))))

    def problem_of(self, scene: Scene, fitted: Any = None) -> Problem:
        """What the engine is given of a scene, and of what was learned."""
        return Problem.of(scene, fitted)

    def run(self, scene: Scene, fitted: Any = None) -> Reconstruction:
        """Match the update of every victim; who knows the defense tries more than one way, and chooses."""
        tries = self._tries(scene, self.problem_of(scene, fitted))
        counter = Counter(scene.bench.report, sum(self._steps(each, scene) for each in tries.all))
        found = [match(each.problem, each.recipe, scene.bench, counter) for each in tries.all]
        return chosen(scene, tries, [each.handed_in(scene, made) for each, made in zip(tries.all, found, strict=True)])

    def estimate(self, scene: Scene) -> Work:
        """The steps of all tries and chunks, and what they take uncompiled."""
        few = scene.rows(slice(0, 1))
        tries = self._tries(few, self.problem_of(few)).all
        tries = tuple(replace(each, problem=_as_many(each.problem, scene.count)) for each in tries)
        seconds = sum(attack_seconds(each.problem, each.recipe, scene.bench.chunk) for each in tries)
        return Work(sum(self._steps(each, scene) for each in tries), seconds)

    def _tries(self, scene: Scene, problem: Problem) -> Tries:
        def own(recipe: Recipe) -> Recipe:
            text = problem.text
            return fitting(recipe, scene.public.layout) if text is None else fitting_text(recipe, text)

        stronger, besides = ([own(each) for each in some] for some in (self.under_noise(), self.besides()))
        return tries_of(scene, problem, own(self.checked_recipe()), stronger, besides)

    def _steps(self, each: Try, scene: Scene) -> int:
        return steps_in_all(each.problem, each.recipe, scene.bench.chunk)

    def pieces(self, scene: Scene) -> list[Scene]:
        """As many victims as are stacked at a time."""
        chunk = scene.bench.chunk or victims_at_a_time(self._outline(scene), self.checked_recipe().seeds)
        scene = replace(scene, bench=replace(scene.bench, chunk=chunk))
        return [scene.rows(slice(start, start + chunk)) for start in range(0, scene.count, chunk)]

    def _outline(self, scene: Scene) -> Problem:
        """The problem of one victim stands for its form: what a defense's knowledge is made of can take long."""
        return _as_many(self.problem_of(scene.rows(slice(0, 1))), scene.count)


def _as_many(one: Problem, count: int) -> Problem:
    """As many victims as there are, without their numbers."""
    return replace(one, target=one.target.rows([0] * count))
