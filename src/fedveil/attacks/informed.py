"""The attacker who knows the defense: what it tries beside the naive match, and how it chooses.

It makes the tries of the naive attacker too. Tries with equal priors are compared by how well they explain the update;
where the defense adds noise, stronger priors are tried, and the strongest is kept that the noise lets pass. So it does
worse than the naive attacker only where the choice, which is made without the truth, goes wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedveil.attacks.choosing import explanations, judged_by_noise, plausible
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.match import MatchName
from fedveil.attacks.notes import taken
from fedveil.attacks.optimizers import LBFGS
from fedveil.attacks.polish import polishing
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.attacks.scene import Scene
from fedveil.attacks.undoing import undone, undone_sentences
from fedveil.defenses.base import Knowledge
from fedveil.defenses.likelihood import reading

CLEARLY = 0.8  # what is left unexplained where a perturbation is undone, in parts of what is without
UNEVEN = 2.0  # times as far as by an even spread that an entry may have moved
REWEIGHED = 4  # times that trust is estimated anew
_TINY = 1e-30  # a variance
REWEIGHED_STEPS = 20  # of L-BFGS in all, where a recipe has none of its own


@dataclass(frozen=True, eq=False)
class Try:
    """One way to attack every victim."""

    problem: Problem
    recipe: Recipe
    undoes: bool = False  # what is found is where the gradient was taken: the perturbation is then undone

    def handed_in(self, scene: Scene, found: Reconstruction) -> Reconstruction:
        """What was found as it is judged: of tables and sentences, what there can be."""
        text, inputs = self.problem.text, found.inputs
        if text is not None:
            inputs = undone_sentences(scene, text, inputs, found.labels) if self.undoes else text.read(inputs)
            return replace(found, inputs=inputs, iterates=text.read_all(found.iterates))
        inputs = scene.public.layout.settled(inputs)
        return replace(found, inputs=undone(scene, inputs, found.labels) if self.undoes else inputs)


@dataclass(frozen=True, eq=False)
class Tries:
    """What an attacker who knows the defense tries."""

    alike: tuple[Try, ...]  # with equal priors: the best explanation wins
    stronger: tuple[Try, ...] = ()  # with stronger priors, the strongest first

    @property
    def all(self) -> tuple[Try, ...]:
        """One after another."""
        return self.alike + self.stronger


def tries_of(
    scene: Scene, problem: Problem, recipe: Recipe, stronger: Sequence[Recipe], besides: Sequence[Recipe] = ()
) -> Tries:
    """What to try in a scene, given the naive recipe and the same with stronger priors.

    problem: as the knowledge of the scene's chain puts it. besides: others, for updates without noise of a known law.
    """
    if not scene.chain.defenses:
        return Tries((Try(problem, recipe),))
    known = scene.knowledge()
    plain = scene.as_it_is()
    kept = problem.without_left_out
    given = replace(problem, target=kept(plain.target), weight=kept(plain.weight))
    naive = replace(given, reweight=None, views=(), rejoin=None, before=())
    alike = [Try(naive, recipe)]
    informed = _adapted(recipe, known)
    if known.reach:
        alike.append(Try(_widened(problem, known), informed, undoes=True))
    if not known.reach and (informed != recipe or not _same(known, plain)):
        alike.append(Try(problem, informed))
    noisy = known.reweight is None and not known.reach and judged_by_noise(scene)
    fitting = [each for each in stronger if _fits(each, known)] if noisy else []
    if fitting:
        return Tries(tuple(alike), tuple(_under_noise(problem, each, known) for each in fitting))
    return Tries((*alike, *(Try(problem, each) for each in besides)))


def chosen(scene: Scene, tries: Tries, found: Sequence[Reconstruction]) -> Reconstruction:
    """Each victim's reconstruction that the attacker settles on, of those that the tries came to."""
    alike, stronger = list(found[: len(tries.alike)]), found[len(tries.alike) :]
    best = alike[0]
    if len(alike) > 1:
        scores = explanations(scene, alike)
        for place in range(1, len(alike)):
            wins = _explains_more(scene, scores[:, place], scores[:, :place].amax(1), tries.alike[place])
            best = taken(best, alike[place], wins.to(best.inputs.device))
    return _with_stronger(scene, tries.stronger, best, stronger) if stronger else best


def _explains_more(scene: Scene, score: Tensor, best: Tensor, tried: Try) -> Tensor:
    """Whether a try explains each update better than the best so far (V,).

    What does no more than undo a perturbation must do so clearly: replayed, a perturbation starts elsewhere, and of two
    that are nearly as good the replay prefers one by chance.
    """
    rule = reading(scene.chain, scene.updates).rule
    if not tried.undoes or tried.problem.before or rule == "density":
        return score > best
    perfect = 0.0 if rule == "distance" else 1.0  # minus a squared distance, or a cosine
    return (perfect - score) < CLEARLY * (perfect - best)


def _with_stronger(
    scene: Scene, tries: Sequence[Try], best: Reconstruction, stronger: Sequence[Reconstruction]
) -> Reconstruction:
    """The strongest of stronger priors that the noise lets pass; `best`, where it lets none pass.

    Some laws let nothing pass that is not nearly exact, such as those with a bound. If they rule out `best` too, they
    cannot tell what is too strong, and whatever explains the update best counts.
    """
    passes = torch.stack([plausible(scene, each) for each in stronger], 1)
    unclear = ~(plausible(scene, best) | passes.any(1))
    passes &= _near(scene, tries, stronger)
    if bool(unclear.any()):
        scores = explanations(scene, [best, *stronger])
        for place in range(1, scores.shape[1]):
            passes[:, place - 1] |= unclear & (scores.argmax(1) == place)
    # From the weakest to the strongest: the last that passes stays.
    for place, smoother in reversed(list(enumerate(stronger))):
        best = taken(best, smoother, passes[:, place].to(best.inputs.device))
    return best


def _fits(recipe: Recipe, known: Knowledge) -> bool:
    """Whether a recipe for noisy updates can be tried: one by the likelihood only where noise and size are known."""
    return not recipe.by_noise or (known.noise is not None and known.bound != math.inf)


def _under_noise(problem: Problem, recipe: Recipe, known: Knowledge) -> Try:
    """A recipe with a stronger prior. One by the likelihood measures distances in units of the noise."""
    if not recipe.by_noise:
        return Try(problem, _adapted(recipe, known))
    assert known.noise is not None
    unit = known.bound or 1.0
    inputs = problem.batch_size * math.prod(problem.shape)
    kept = problem.without_left_out
    weight = kept(known.noise).map(lambda variance: unit**2 / (2 * inputs * variance.clamp_min(_TINY)))
    if known.bound is not None:
        recipe = _all_matching(recipe, "unit-l2")
    return Try(replace(problem, target=kept(known.target) / unit, weight=weight), recipe)


def _near(scene: Scene, tries: Sequence[Try], found: Sequence[Reconstruction]) -> Tensor:
    """Whether each explains an update nearly as well as the best of those that say by how much: shape (V, N)."""
    near = torch.ones(scene.count, len(found), dtype=torch.bool)
    slack = {place: each.recipe.slack for place, each in enumerate(tries) if each.recipe.slack is not None}
    if len(slack) > 1:
        scores = explanations(scene, [found[place] for place in slack])
        allowed = scene.batch_size * torch.tensor(list(slack.values()), dtype=scores.dtype)
        near[:, list(slack)] = scores >= scores.amax(1, keepdim=True) - allowed
    return near


def _same(known: Knowledge, plain: Knowledge) -> bool:
    """Whether knowing the defense tells nothing more than to take the update as it is."""
    pairs = ((known.target, plain.target), (known.weight, plain.weight))
    return not known.before and all(
        torch.equal(left, other[name]) for tree, other in pairs for name, left in tree.items()
    )


def _widened(problem: Problem, known: Knowledge) -> Problem:
    """The problem in whose box inputs lie that a defense moved out of the valid range.

    No wider than that: most pixels lie at an end of their range, and to know that is worth much.
    """
    if problem.box is None:
        return problem
    low, high = problem.box
    reach = min(known.reach, UNEVEN * known.length / math.prod(problem.shape) ** 0.5)
    return replace(problem, box=(low - reach, high + reach))


def _adapted(recipe: Recipe, known: Knowledge) -> Recipe:
    """The recipe with as many steps, as the knowledge asks for it.

    Where the size of the update is not known, its direction is matched. Where it is not known which entries are right,
    the last steps follow after the trust in each entry is estimated anew.
    """
    if known.signs:
        return _matching_signs(recipe)
    if known.bound is not None:
        recipe = _all_matching(recipe, "direction")
    if known.reweight is not None:
        recipe = replace(recipe, tries=tuple(_with_reweighing(phases) for phases in recipe.tries))
    return recipe


def _all_matching(recipe: Recipe, match: MatchName) -> Recipe:
    """The same for an update whose size was changed: at the right inputs a distance would not be small."""

    def other(phase: Phase) -> Phase:
        return replace(phase, match=match) if phase.match in ("l2", "relative-l2") else phase

    return replace(recipe, tries=tuple(tuple(other(phase) for phase in phases) for phases in recipe.tries))


def _matching_signs(recipe: Recipe) -> Recipe:
    """The same by the likelihood of signs, also at its end: no fit explains the squares of what was sent."""

    def alike(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        return tuple(replace(phase, match=None, accepts=None) for phase in phases)

    return replace(recipe, match="signs", tries=tuple(alike(phases) for phases in recipe.tries))


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
