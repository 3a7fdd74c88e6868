"""Attackers who know the defense: what they try, how they choose without the truth, and what that is worth."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedveil.attacks import inverting_gradients
from fedveil.attacks.choosing import explanations, plausible
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.informed import chosen, tries_of
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.matcher import Matcher, match
from fedveil.attacks.optimizers import LBFGS, Adam
from fedveil.attacks.polish import EXPLAINED, polishing
from fedveil.attacks.priors import Outside
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.attacks.scene import Workbench
from fedveil.attacks.undoing import undone
from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.defenses.chain import Chain
from fedveil.defenses.clip import Clip
from fedveil.defenses.dp_clip import DPClip
from fedveil.defenses.dp_laplace import DPLaplace
from fedveil.defenses.dp_sgd import DPSGD
from fedveil.defenses.fedem import FedEM
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.defenses.noise import GaussianNoise
from fedveil.defenses.sign import SignCompression
from fedveil.leakage.metrics import psnr
from fedveil.streams import Streams

from .small import digits, scene_of, task_of

STACKED = Workbench(backend="stacked")
QUICK = InvertingGradients(steps=60, restarts=1, polish=15)


def defended(defense, victims=4, batch=1, model="lenet"):
    """(originals (V, B, ...), the scene of an attacker who knows the defense)."""
    inputs, targets, problem = digits(model, victims=victims, batch=batch)
    chain = Chain.of(defense)
    engine = Engine(problem.model, F.cross_entropy, backend="stacked")
    streams = Streams.seeded(11, range(victims))
    client = ClientBatch(engine, problem.params, problem.buffers, inputs, targets, streams)
    sent = chain.step(client, chain.new_states()).update
    return inputs, scene_of(replace(problem, target=sent), chain=chain, bench=STACKED)


def naive(scene):
    return replace(scene, chain=Chain())


def quality(found, inputs, model="lenet"):
    return psnr(found.inputs.flatten(0, 1), inputs.flatten(0, 1), task_of(model).normalization.std).mean().item()


def handed_in(inputs, labels):
    """A reconstruction as an attack would hand it in."""
    return Reconstruction(inputs, labels, torch.zeros(len(inputs)), seconds=0.0)


# ---- what it is worth ---------------------------------------------------------------------------------------


def test_trust_that_is_estimated_anew_undoes_gradient_dropout():
    inputs, scene = defended(GradientDropout(keep=0.6))
    aware, blind = quality(QUICK.run(scene), inputs), quality(QUICK.run(naive(scene)), inputs)
    assert aware > 30, (aware, blind)
    assert blind < 20, (aware, blind)


def test_replaying_a_data_defense_gets_nearer_than_what_its_gradient_was_taken_at():
    inputs, scene = defended(FedEM(radius=2.0))
    aware, blind = quality(QUICK.run(scene), inputs), quality(QUICK.run(naive(scene)), inputs)
    assert aware > blind + 4, (aware, blind)


def test_stronger_priors_help_under_noise():
    inputs, scene = defended(GaussianNoise(sigma=0.1), victims=6)
    aware, blind = quality(QUICK.run(scene), inputs), quality(QUICK.run(naive(scene)), inputs)
    assert aware > blind - 0.5, (aware, blind)


def test_the_likeliest_picture_beats_a_match_with_more_total_variation():
    inputs, scene = defended(GaussianNoise(sigma=0.02), victims=6)
    likeliest, *others = QUICK.under_noise()
    likely = tries_of(scene, Problem.of(scene), QUICK.recipe(), (likeliest,)).stronger[0]
    best = quality(match(likely.problem, likely.recipe, STACKED), inputs)
    assert best > 3 + max(quality(match(Problem.of(scene), each, STACKED), inputs) for each in others)


def test_the_size_that_clipping_took_is_not_matched():
    inputs, scene = defended(Clip(norm=0.1))
    aware, blind = quality(QUICK.run(scene), inputs), quality(QUICK.run(naive(scene)), inputs)
    assert aware > 35, (aware, blind)
    assert blind < aware - 10, (aware, blind)


def test_under_clipping_and_noise_distances_are_in_units_of_the_noise_per_input():
    """At the very originals each entry is off by one deviation: half their number, per input, is the cost."""
    for defense in (DPClip(clip=0.1, sigma=0.002), GaussianNoise(sigma=0.05), DPSGD(clip=0.1, noise_multiplier=0.02)):
        inputs, scene = defended(defense, victims=3)
        found = tries_of(scene, Problem.of(scene), QUICK.recipe(), QUICK.under_noise()).stronger[0]
        phase = found.recipe.tries[0][-1]
        made = Matcher(found.problem, found.recipe, STACKED)
        objective = found.recipe.objective(phase)
        _, cost, _ = made._evaluate({"inputs": inputs}, made._fixed(found.problem, objective), objective)
        expected = scene.updates.message.size / (2 * inputs[0].numel())
        torch.testing.assert_close(cost, torch.full_like(cost, expected), rtol=0.1, atol=0)


@pytest.mark.parametrize(("flip", "more"), [(0.0, 6), (0.2, 3)])
def test_signs_are_matched_by_their_likelihood(flip, more):
    inputs, scene = defended(SignCompression(flip=flip))
    aware, blind = quality(QUICK.run(scene), inputs), quality(QUICK.run(naive(scene)), inputs)
    assert aware > blind + more, (aware, blind)


def test_signs_that_noise_came_to_or_that_several_steps_add_up_to_are_not_matched_as_such():
    _, scene = defended(SignCompression())
    facts, sent = scene.updates.facts, scene.updates.message
    known = (Chain.of(defense).knowledge for defense in ("sign-compression", "sign-compression+gaussian-noise"))
    assert [one(sent, facts).signs for one in known] == [True, False]
    several = replace(facts, kind="weights", steps=3)
    assert not Chain.of("sign-compression").knowledge(sent, several).signs


def test_polishing_rebuilds_whole_batches():
    inputs, scene = defended(None, victims=2, batch=4)
    with_it, without = (replace(QUICK, polish=polish).run(scene) for polish in (40, 0))
    assert with_it.cost.max() < 1e-3
    error = [(found.inputs - inputs).square().mean().item() for found in (with_it, without)]
    assert error[0] < error[1] / 20, error


def test_a_fit_to_noise_is_not_kept():
    _, scene = defended(GaussianNoise(sigma=0.5))
    bare = replace(QUICK, polish=0)
    polished, plain = QUICK.run(naive(scene)), bare.run(naive(scene))
    assert (polished.cost > EXPLAINED).all()
    torch.testing.assert_close(polished.inputs, plain.inputs)


def test_victims_alone_are_attacked_as_in_a_stack(monkeypatch):
    """With few steps of the gradient itself: signs and long searches amplify the rounding of stacked products."""
    monkeypatch.setattr(inverting_gradients, "LIKELIEST_STEPS", 1)
    for defense in (GradientDropout(keep=0.6), GaussianNoise(sigma=0.1)):
        _, scene = defended(defense, victims=3)
        short = replace(QUICK, steps=4, signed=False, polish=1)
        together, alone = short.run(scene), short.run(scene.rows([1]))
        torch.testing.assert_close(together.inputs[1:2], alone.inputs, rtol=1e-2, atol=1e-2)


# ---- what is tried -------------------------------------------------------------------------------------------


def tries(defense, attack=QUICK):
    _, scene = defended(defense, victims=2)
    return scene, tries_of(scene, Problem.of(scene), attack.recipe(), attack.under_noise())


def test_without_a_defense_there_is_one_way():
    _, found = tries(None)
    assert len(found.alike) == 1
    assert not found.stronger


def test_the_naive_match_is_always_among_them_and_takes_as_many_steps():
    for defense in (GradientDropout(keep=0.6), FedEM(radius=2.0), GaussianNoise(sigma=0.1)):
        scene, found = tries(defense)
        first = found.alike[0].problem
        assert all(torch.equal(first.target[name], tensor) for name, tensor in scene.updates.gradient.items())
        assert all((tensor == 1).all() for tensor in first.weight.values())
        assert {each.recipe.steps for each in found.alike} == {QUICK.recipe().steps}


def test_dropout_is_reweighed_in_the_steps_of_the_polish():
    _, found = tries(GradientDropout(keep=0.6))
    phases = found.alike[1].recipe.tries[0]
    assert [phase.steps for phase in phases] == [60, 4, 4, 4, 3]
    assert [phase.reweighs for phase in phases] == [False, True, True, True, True]
    published = InvertingGradients(steps=100, polish=0, restarts=1)
    _, found = tries(GradientDropout(keep=0.6), published)
    assert [phase.steps for phase in found.alike[1].recipe.tries[0]] == [80, 5, 5, 5, 5]


def test_the_box_is_widened_by_what_the_defense_may_move():
    scene, found = tries(FedEM(radius=2.0, alpha=0.1, steps=5))
    (low, high), (wide_low, wide_high) = scene.public.layout.box, found.alike[1].problem.box
    torch.testing.assert_close(wide_low, low - 0.5)
    torch.testing.assert_close(wide_high, high + 0.5)
    assert found.alike[1].undoes


def test_stronger_priors_are_tried_only_where_noise_of_a_known_law_is_added():
    assert [each.recipe.by_noise for each in tries(GaussianNoise(sigma=0.1))[1].stronger] == [True] + 3 * [False]
    # Where the norm was bounded in another way, or the noise has no one level, there is no likelihood to go by.
    assert not any(each.recipe.by_noise for each in tries(DPLaplace(clip=1.0, epsilon=1e4))[1].stronger)
    assert not tries(GradientDropout(keep=0.6))[1].stronger
    assert not tries(FedEM(radius=2.0))[1].stronger
    weights = [each.recipe.priors[0].weight for each in tries(GaussianNoise(sigma=0.1))[1].stronger[1:]]
    assert weights == sorted(weights, reverse=True)


# ---- how it chooses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("defense", [GaussianNoise(sigma=0.005), GradientDropout(keep=0.5), FedEM(radius=2.0)])
def test_the_original_explains_an_update_best(defense):
    inputs, scene = defended(defense, victims=3)
    noise = Streams.seeded(3, range(3)).normal(*inputs.shape[1:])
    others = [inputs, inputs + 0.3 * noise, inputs.roll(1, 0)]
    scores = explanations(scene, [handed_in(each, scene.labels) for each in others])
    assert (scores.argmax(1) == 0).all()


def test_what_diverged_explains_nothing():
    inputs, scene = defended(GaussianNoise(sigma=0.05), victims=2)
    broken = inputs.clone()
    broken[0] = torch.nan
    scores = explanations(scene, [handed_in(broken, scene.labels), handed_in(inputs.flip(0), scene.labels)])
    assert scores[0].argmax() == 1
    assert scores[1].argmax() == 0
    assert plausible(scene, handed_in(broken, scene.labels)).tolist() == [False, True]


def test_the_original_is_plausible_and_what_misses_by_more_than_the_noise_is_not():
    inputs, scene = defended(GaussianNoise(sigma=0.005), victims=6)
    assert plausible(scene, handed_in(inputs, scene.labels)).double().mean() > 0.8
    assert not plausible(scene, handed_in(torch.zeros_like(inputs), scene.labels)).any()
    # A defense without randomness on the update explains no difference at all.
    inputs, scene = defended(FedEM(radius=2.0), victims=2)
    assert not plausible(scene, handed_in(inputs, scene.labels)).any()


def test_the_strongest_plausible_prior_wins_and_without_any_the_best_explanation():
    inputs, scene = defended(GaussianNoise(sigma=0.005), victims=3)
    recipe = Recipe(tries=((Phase(2),),))
    made = tries_of(scene, Problem.of(scene), recipe, (recipe, recipe))
    runs = [match(each.problem, each.recipe, STACKED) for each in made.all]
    assert len(runs) == 3
    wrong, right = torch.zeros_like(inputs), inputs
    passes = plausible(scene, handed_in(right, scene.labels))  # a draw in twenty or so is stranger than that
    assert passes.any()

    def choice(*handed):
        return chosen(scene, made, [replace(run, inputs=each) for run, each in zip(runs, handed, strict=True)]).inputs

    assert torch.equal(choice(wrong, wrong + 1, right)[passes], right[passes])
    assert torch.equal(choice(wrong, right, 0.999 * right)[passes], right[passes])
    assert torch.equal(choice(wrong, wrong + 1, wrong + 2), wrong)


def test_undoing_gives_back_what_a_known_perturbation_moved():
    inputs, scene = defended(FedEM(radius=1.0), victims=3)
    engine = Engine(scene.public.model, F.cross_entropy, backend="stacked")
    streams = Streams.seeded(11, range(3))
    client = ClientBatch(engine, scene.updates.before, scene.updates.buffers, inputs, scene.labels, streams)
    moved = scene.chain.moved(client)
    before, after = ((each - inputs).square().mean() for each in (moved, undone(scene, moved, scene.labels)))
    assert after < before / 4


# ---- phases --------------------------------------------------------------------------------------------------


def test_a_phase_that_does_not_get_below_its_limit_is_taken_back_for_those_victims():
    _, _, problem = digits("lenet", victims=3)
    first, second = Phase(5, Adam(0.1)), Phase(3, LBFGS(), match="relative-l2")
    limits = match(problem, Recipe(tries=((first, second),)), STACKED).cost
    middle = float(limits.sort().values[1])
    found = match(problem, Recipe(tries=((first, replace(second, accepts=middle)),)), STACKED)
    begun, whole = (match(problem, Recipe(tries=(p,)), STACKED).inputs for p in ((first,), (first, second)))
    kept = limits < middle
    assert kept.sum() == 1
    torch.testing.assert_close(found.inputs[kept], whole[kept])
    torch.testing.assert_close(found.inputs[~kept], begun[~kept])


def test_the_valid_range_as_a_prior():
    box = (torch.tensor(-1.0), torch.tensor(2.0))
    inputs = torch.tensor([[-2.0, 0.0, 2.0, 5.0]])
    assert Outside(0.5)(inputs, box).item() == pytest.approx(0.5 * (1 + 0 + 0 + 9) / 4)
    assert Outside(0.5)(inputs, None) == 0
    assert polishing(3).accepts == EXPLAINED
    assert polishing(3, reweighs=True).accepts is None


def test_a_small_perturbation_is_undone_only_if_that_clearly_explains_more():
    inputs, scene = defended(FedEM(radius=8 / 255))
    aware, blind = quality(QUICK.run(scene), inputs), quality(QUICK.run(naive(scene)), inputs)
    assert aware > blind - 0.1, (aware, blind)
