"""The attacker who knows the defense: what it tries beside the naive match, and how it chooses.

It makes the tries of the naive attacker too. Tries with equal priors are compared by how well they explain the update;
where the defense adds noise, stronger priors are tried, and the strongest is kept that the noise lets pass. So it does
worse than the naive attacker only where the choice, which is made without the truth, goes wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedveil.attacks.choosing import explanations, judged_by_noise, plausible
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.notes import taken
from fedveil.attacks.optimizers import LBFGS
from fedveil.attacks.polish import polishing
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.attacks.scene import Scene
from fedveil.attacks.undoing import undone
from fedveil.defenses.base import Knowledge

REWEIGHED = 4  # times that trust is estimated anew
REWEIGHED_STEPS = 20  # of L-BFGS in all, where a recipe has none of its own


@dataclass(frozen=True, eq=False)
class Try:
    """One way to attack every victim."""

    problem: Problem
    recipe: Recipe
    undoes: bool = False  # what is found is where the gradient was taken: the perturbation is then undone


@dataclass(frozen=True, eq=False)
class Tries:
    """What an attacker who knows the defense tries."""

    alike: tuple[Try, ...]  # with equal priors: the best explanation wins
    stronger: tuple[Try, ...] = ()  # with stronger priors, the strongest first

    @property
    def all(self) -> tuple[Try, ...]:
        """One after another."""
        return self.alike + self.stronger


def tries_of(scene: Scene, problem: Problem, recipe: Recipe, stronger: Sequence[Recipe]) -> Tries:
    """What to try in a scene, given the naive recipe and the same with stronger priors.

    problem: as the knowledge of the scene's chain puts it.
    """
    if not scene.chain.defenses:
        return Tries((Try(problem, recipe),))
    known = scene.knowledge()
    plain = scene.as_it_is()
    given = replace(problem, target=plain.target, weight=plain.weight)
    naive = replace(given, reweight=None, views=(), rejoin=None, before=())
    alike = [Try(naive, recipe)]
    informed = _told_apart(recipe, known)
    if known.reach:
        alike.append(Try(_widened(problem, known.reach), informed, undoes=True))
    if not known.reach and (informed != recipe or not _same(known, plain)):
        alike.append(Try(problem, informed))
    noisy = known.reweight is None and not known.reach and judged_by_noise(scene)
    return Tries(tuple(alike), tuple(Try(problem, each) for each in stronger) if noisy else ())


def chosen(scene: Scene, tries: Tries, found: Sequence[Reconstruction]) -> Reconstruction:
    """Each victim's reconstruction that the attacker settles on, of those that the tries came to."""
    alike, stronger = list(found[: len(tries.alike)]), found[len(tries.alike) :]
    for place, each in enumerate(tries.alike):
        if each.undoes:
            alike[place] = replace(alike[place], inputs=undone(scene, alike[place].inputs, alike[place].labels))
    best = alike[0]
    if len(alike) > 1:
        scores = explanations(scene, alike)
        for place in range(1, len(alike)):
            wins = (scores[:, place] > scores[:, :place].amax(1)).to(best.inputs.device)
            best = taken(best, alike[place], wins)
    # From the weakest of the stronger ones to the strongest: the last that the noise lets pass stays.
    for smoother in reversed(stronger):
        best = taken(best, smoother, plausible(scene, smoother).to(best.inputs.device))
    return best


def _same(known: Knowledge, plain: Knowledge) -> bool:
    """Whether knowing the defense tells nothing more than to take the update as it is."""
    pairs = ((known.target, plain.target), (known.weight, plain.weight))
    return not known.before and all(
        torch.equal(left, other[name]) for tree, other in pairs for name, left in tree.items()
    )


def _widened(problem: Problem, reach: float) -> Problem:
    """The problem in whose box inputs lie that a defense moved out of the valid range."""
    if problem.box is None:
        return problem
    low, high = problem.box
    return replace(problem, box=(low - reach, high + reach))


def _told_apart(recipe: Recipe, known: Knowledge) -> Recipe:
    """The recipe with as many steps, of which the last ones follow after the trust in each entry is estimated anew."""
    if known.reweight is None:
        return recipe
    return replace(recipe, tries=tuple(_with_reweighing(phases) for phases in recipe.tries))


def _with_reweighing(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    *first, last = phases
    if isinstance(last.optimizer, LBFGS):  # all of it is made of such rounds
        steps, kept = last.steps, []
    else:
        steps = min(REWEIGHED_STEPS, last.steps // 2)
        kept = [replace(last, steps=last.steps - steps)]
    rounds = min(REWEIGHED, steps)
    shares = [steps // rounds + (number < steps % rounds) for number in range(rounds)] if rounds else []
    return (*first, *kept, *(polishing(share, reweighs=True) for share in shares))
