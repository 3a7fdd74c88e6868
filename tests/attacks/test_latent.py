"""Attacks that search with a generator: what they move, what they are worth, and how the informed ones choose."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from fedveil.attacks import matcher
from fedveil.attacks.candidate import Found
from fedveil.attacks.choosing import explanations, plausible
from fedveil.attacks.generator_attack import HELD_OUT, NEARER
from fedveil.attacks.gias import GIAS
from fedveil.attacks.informed import Tries, Try, chosen
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.lab import Lab
from fedveil.attacks.latent import CENTER, CODE, COPY, LATENTS, GeneratorCopies, Latents
from fedveil.attacks.latent_start import LatentStart
from fedveil.attacks.matcher import match
from fedveil.attacks.optimizers import Adam
from fedveil.attacks.ordering import found_orders
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.attacks.scene import LocalSteps, Workbench
from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.defenses.chain import Chain
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.defenses.noise import GaussianNoise
from fedveil.defenses.pruning import GradientPruning
from fedveil.defenses.spm import SPM
from fedveil.errors import FedveilError
from fedveil.leakage.metrics import psnr
from fedveil.streams import Streams
from fedveil.tree import Tree

from .small import digits, problem_of, scene_of, task_of

STACKED = Workbench(backend="stacked")
QUICK = LatentStart(steps=50, pixel_steps=10, polish=8, latents=24)
COPIES = GIAS(steps=60, weight_steps=30, latents=24)


@cache
def fitted():
    """A generator that was trained on digits that are no victims'."""
    made = task_of("lenet")
    inputs, targets = made.train.batch([0])
    scene = scene_of(problem_of(made.model, inputs[:, None], targets[:, None], box=made.normalization.box()))
    return QUICK.fit(Lab(scene.public, scene.updates, made.train, Streams.seeded(0, [0], "lab")))


def learned():
    return {name: tensor for name, tensor in fitted().items() if name != HELD_OUT}


def problem(victims=3, batch=1):
    inputs, _, made = digits("lenet", victims=victims, batch=batch)
    return inputs, replace(made, learned=learned())


def defended(defense, victims=4, batch=1):
    """(originals, the scene of an attacker who knows the defense)."""
    inputs, targets, made = digits("lenet", victims=victims, batch=batch)
    chain = Chain.of(defense)
    engine = Engine(made.model, F.cross_entropy, backend="stacked")
    client = ClientBatch(engine, made.params, made.buffers, inputs, targets, Streams.seeded(11, range(victims)))
    sent = chain.step(client, chain.new_states()).update
    return inputs, scene_of(replace(made, target=sent), chain=chain, bench=STACKED)


def quality(found, inputs):
    return psnr(found.inputs.flatten(0, 1), inputs.flatten(0, 1), task_of("lenet").normalization.std).mean().item()


def naive(scene):
    return replace(scene, chain=Chain())


# ---- what is moved -------------------------------------------------------------------------------------------


def test_a_search_starts_near_the_mean_picture_of_each_label():
    _, made = problem(victims=4, batch=2)
    start = Latents(jitter=0.0).start(made, made.streams)
    assert (start[LATENTS] == 0).all()
    assert torch.equal(start[CENTER], made.learned["centers"][made.labels])
    unknown = Latents().start(replace(made, labels=None), made.streams)
    assert torch.equal(unknown[CENTER], made.learned["mean"].expand(4, 2, -1))
    strange = Latents().start(replace(made, labels=torch.full((4, 2), 11)), made.streams)
    assert torch.equal(strange[CENTER], unknown[CENTER])


def test_what_is_drawn_is_valid_whatever_the_latents_are():
    _, made = problem()
    low, high = made.box
    start = Latents(jitter=50.0).start(made, made.streams)
    drawn = vmap(Latents().decode, in_dims=(0, None))(start, made.learned)
    assert drawn.shape == (3, 1, 1, 8, 8)
    assert ((drawn >= low - 1e-5) & (drawn <= high + 1e-5)).all()


def test_only_latents_are_moved():
    _, made = problem()
    start = {name: tensor[0] for name, tensor in Latents().start(made, made.streams).items()}
    found = grad(lambda at: Latents().decode(at, made.learned).square().sum())(start)
    assert (found[CENTER] == 0).all()
    assert (found[LATENTS] != 0).any()
    assert Latents().cost(start) is None
    assert Latents(0.5).cost(start) == pytest.approx(0.5 * start[LATENTS].square().mean().item())


def test_copies_begin_as_the_generator_at_the_latents_that_were_found_and_go_on_from_copies():
    _, made = problem(victims=2, batch=3)
    latents = Latents(jitter=1.0).start(made, made.streams)
    drawn = vmap(Latents().decode, in_dims=(0, None))(latents, made.learned)
    copies = GeneratorCopies().start(made, made.streams, Found(drawn, latents))
    torch.testing.assert_close(vmap(GeneratorCopies().decode, in_dims=(0, None))(copies, made.learned), drawn)
    moved = {name: tensor + 0.01 if name.startswith(COPY) else tensor for name, tensor in copies.items()}
    again = GeneratorCopies().start(made, made.streams, Found(drawn, moved))
    assert again.keys() == copies.keys()
    assert all(torch.equal(tensor, moved[name]) for name, tensor in again.items())
    assert copies[CODE].shape == (2, 3, 24)


def test_local_steps_are_ordered_by_the_mean_pictures_before_the_first_search(monkeypatch):
    """Noise says nothing of the order; the mean pictures of the labels do, and a wrong one leads the search astray."""
    _, made = problem(victims=2, batch=2)
    local, seen = LocalSteps((0.1, 0.1), (1, 1)), []

    def told(problem, inputs, *rest, **options):
        seen.append((problem.order is None, inputs))
        return found_orders(problem, inputs, *rest, **options)

    monkeypatch.setattr(matcher, "found_orders", told)
    recipe = LatentStart(steps=4, pixel_steps=1, polish=0, latents=24).recipe()
    match(replace(made, local=local), recipe, STACKED)
    begin = Latents(jitter=0.0).start(made, made.streams)
    means = vmap(Latents().decode, in_dims=(0, None))(begin, made.learned)
    assert [first for first, _ in seen] == [True] + [False] * 4, "four parts in the latent space, one of pixels"
    assert quality(Found(seen[0][1], {}), means) > 15


def test_each_picture_has_a_copy_of_its_own():
    _, made = problem(victims=1, batch=2)
    copies = {name: tensor[0] for name, tensor in GeneratorCopies().start(made, made.streams).items()}
    found = grad(lambda at: GeneratorCopies().decode(at, made.learned)[0].square().sum())(copies)
    weight = found[f"{COPY}decoder.linear.weight"]
    assert (weight[0] != 0).any()
    assert (weight[1] == 0).all()
    assert (found[CODE] == 0).all()


def test_victims_run_alike_on_loop_and_stack():
    _, made = problem(victims=2)
    phases = (Phase(5, Adam(0.1, signed=False), candidate=Latents(1e-3)), Phase(3, Adam(1e-3, signed=False)))
    recipe = Recipe(candidate=GeneratorCopies(), tries=(phases,))
    loop, stacked = (match(made, recipe, Workbench(backend=each)) for each in ("loop", "stacked"))
    torch.testing.assert_close(loop.inputs, stacked.inputs, rtol=1e-3, atol=1e-3)


def test_a_victim_alone_is_attacked_as_in_a_stack():
    _, scene = defended(GaussianNoise(sigma=0.05), victims=3)
    short = replace(QUICK, steps=4, pixel_steps=2, polish=1)
    together, alone = short.run(scene, fitted()), short.run(scene.rows([1]), fitted())
    torch.testing.assert_close(together.inputs[1:2], alone.inputs, rtol=1e-2, atol=1e-2)


# ---- what it is worth ----------------------------------------------------------------------------------------


def test_latents_find_digits_and_pixels_take_them_further():
    inputs, scene = defended(None)
    alone = match(Problem.of(scene, learned()), QUICK.in_latents_alone(())[0], STACKED)
    found = QUICK.run(scene, fitted())
    mean = torch.zeros_like(inputs) + task_of("lenet").train.batch(range(900))[0].mean(0)
    floor = psnr(mean.flatten(0, 1), inputs.flatten(0, 1), task_of("lenet").normalization.std).mean().item()
    assert quality(alone, inputs) > floor + 2, floor
    assert quality(found, inputs) > quality(alone, inputs) + 15


def test_under_noise_a_generator_gets_more_than_pixels_do():
    inputs, scene = defended(GaussianNoise(sigma=0.15))
    ours = quality(QUICK.run(scene, fitted()), inputs)
    theirs = quality(InvertingGradients(steps=60, restarts=1, polish=8).run(scene), inputs)
    assert ours > theirs + 1, (ours, theirs)


def test_who_knows_gradient_dropout_gets_nearly_all():
    inputs, scene = defended(GradientDropout(keep=0.6, match_spread=True), victims=3)
    aware, blind = (quality(QUICK.run(each, fitted()), inputs) for each in (scene, naive(scene)))
    assert aware > blind + 8, (aware, blind)


def test_copies_explain_more_than_the_generator():
    inputs, scene = defended(None, victims=3)
    alone = match(Problem.of(scene, learned()), COPIES.in_latents_alone(())[0], STACKED)
    found = COPIES.run(scene, fitted())
    assert (found.cost < alone.cost).all()
    assert quality(found, inputs) > quality(alone, inputs)


def test_published_steps():
    first, second = GIAS.published().recipe().tries[0]
    assert (first.steps, second.steps) == (800, 3200)
    assert (first.optimizer.lr, second.optimizer.lr) == (0.03, 1e-3)
    assert isinstance(first.candidate, Latents)
    assert isinstance(second.candidate, GeneratorCopies)


def test_pieces_hold_no_more_copies_than_fit_into_memory(monkeypatch):
    _, scene = defended(None, victims=6)
    whole = COPIES.pieces(scene)
    monkeypatch.setattr("fedveil.attacks.gias.MOST_NUMBERS", 27_000)
    parts = COPIES.pieces(scene)
    assert [part.count for part in whole] == [6]
    assert [part.count for part in parts] == [2, 2, 2]


# ---- how the informed one chooses ----------------------------------------------------------------------------


def handed_in(like, inputs):
    return replace(like, inputs=inputs)


def tried(scene, *slacks):
    """A naive try, and one for each slack among the stronger; their runs, in which a test puts its own pictures."""
    problem, recipe = Problem.of(scene), Recipe(tries=((Phase(1),),))
    stronger = tuple(Try(problem, replace(recipe, slack=each)) for each in slacks)
    tries = Tries((Try(problem, recipe),), stronger)
    return tries, [match(each.problem, each.recipe, STACKED) for each in tries.all]


def test_of_priors_that_are_held_beside_each_other_the_strongest_within_the_slack_counts():
    inputs, scene = defended(GaussianNoise(sigma=0.2), victims=2)
    inputs, scene = inputs[1:], scene.rows([1])
    off = inputs + 0.15 * Streams.seeded(3, [1]).normal(*inputs.shape[1:])
    runs = tried(scene, 1.0, 1.0)[1]
    gap = explanations(scene, [handed_in(runs[0], each) for each in (inputs, off)])
    between = float((gap[:, 0] - gap[:, 1]).min())
    assert between > 0
    assert plausible(scene, handed_in(runs[0], off)).all()

    def choice(slack):
        tries, runs = tried(scene, slack, slack)
        handed = [handed_in(run, each.clone()) for run, each in zip(runs, (0 * inputs, off, inputs), strict=True)]
        return chosen(scene, tries, handed).inputs

    assert torch.equal(choice(between * 0.9), inputs)
    assert torch.equal(choice(1e9), off)
    assert torch.equal(choice(None), off)


def test_a_law_that_lets_nothing_pass_is_no_yardstick_and_the_best_explanation_counts():
    """SPM sends what a weight is times a factor between bounds: what is not nearly exact cannot have been sent."""
    inputs, _, made = digits("lenet", victims=2)
    chain = Chain.of(SPM(epsilon=0.3))
    weights = made.params - 0.1 * made.target
    sent = chain.defenses[0].resent(weights, scene_of(made).updates.facts, Streams.seeded(5, range(2)))
    scene = scene_of(made, chain=chain, bench=STACKED)
    scene = replace(scene, updates=replace(scene.updates, kind="weights", message=Tree(sent)))
    near, far = 0.9 * inputs, 0 * inputs
    for order, expected in (((far, near, 2 * far), near), ((far, far - 0.1, near), near), ((near, far, far), near)):
        tries, runs = tried(scene, None, None)
        handed = [handed_in(run, each.clone()) for run, each in zip(runs, order, strict=True)]
        torch.testing.assert_close(chosen(scene, tries, handed).inputs, expected)


def test_where_nothing_is_random_the_generators_own_pictures_are_tried_too():
    _, scene = defended(GradientPruning(prune=0.9), victims=2)
    made = QUICK._tries(scene, Problem.of(scene, learned()))
    assert not made.stronger
    assert isinstance(made.all[-1].recipe.tries[0][-1].candidate, Latents)
    _, noisy = defended(GaussianNoise(sigma=0.1), victims=2)
    made = QUICK._tries(noisy, Problem.of(noisy, learned()))
    weights = [each.recipe.tries[0][0].candidate.weight for each in made.stronger]
    assert weights == [*NEARER, *3 * [QUICK.latent_norm]]
    assert [each.recipe.by_noise for each in made.stronger] == [*[False] * (len(NEARER) + 1), True, False]
    assert [each.recipe.slack for each in made.stronger] == [12.0] * 5 + [None] * 2


# ---- where the generator comes from --------------------------------------------------------------------------


def test_without_a_generator_or_auxiliary_data_it_is_one_line():
    _, scene = defended(None, victims=1)
    with pytest.raises(FedveilError, match="latent-start needs a generator"):
        QUICK.run(scene)
    lab = Lab(scene.public, scene.updates, None, Streams.seeded(0, [0]))
    with pytest.raises(FedveilError, match="learns from auxiliary pictures, and there are none"):
        QUICK.fit(lab)


def test_what_was_learned_is_shared_where_training_is_the_same():
    assert QUICK.learning == COPIES.learning
    assert QUICK.learning != replace(COPIES, latents=25).learning
    assert QUICK.learns_about == frozenset()
