"""CI-Net: wide enough, of bounded norm, pure, repeatable; and what an untrained network recovers from real digits."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from fedveil.attacks import matcher
from fedveil.attacks.candidate import Found, Pixels
from fedveil.attacks.cinet import SMOOTHER, CINet
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.optimizers import LBFGS, Adam, Descent
from fedveil.attacks.polish import polishing
from fedveil.attacks.priors import TotalVariation
from fedveil.attacks.scene import Workbench
from fedveil.attacks.untrained import (
    COARSEST,
    HALF,
    MIDDLE,
    NOISE,
    SPARE,
    Lowest,
    Plan,
    UntrainedNetwork,
    grids_to,
    norm_bound,
    with_unit_norm,
)
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.defenses.noise import GaussianNoise
from fedveil.errors import FedveilError
from fedveil.streams import Streams

from .small import as_double, decibels, digits, noise_target, on_the_way, run, task_of
from .test_informed import defended, naive, quality
from .test_matching import assert_same, conv, image_problem
from .test_quality import mean_floor

NETWORK = UntrainedNetwork()
SHORT = CINet(steps=5, polish=0)
sides = st.integers(8, 300)


def started(problem, seed=3):
    return NETWORK.start(problem, Streams.seeded(seed, range(problem.count)))


def of(variables, victim):
    return {name: tensor[victim] for name, tensor in variables.items()}


# ---- the network ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 64), height=sides, width=sides, colors=st.integers(1, 5))
def test_there_are_more_parameters_than_four_for_each_pixel(batch, height, width, colors):
    plan = Plan.of(batch, (colors, height, width))
    size = sum(math.prod(shape) for shape in plan.shapes.values())
    assert size == plan.size > SPARE * batch * height * width
    narrower = Plan(plan.grids, tuple(channels // 2 for channels in plan.channels), colors)
    assert plan.channels[0] == 32 or narrower.size <= SPARE * batch * height * width


@settings(max_examples=60, deadline=None)
@given(height=sides, width=sides)
def test_grids_double_up_to_the_picture(height, width):
    grids = grids_to((height, width))
    assert max(grids[0]) <= COARSEST
    assert grids[-1] == (height, width)
    for coarse, fine in pairwise(grids):
        assert all(small == math.ceil(large / 2) for small, large in zip(coarse, fine, strict=True))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 60), rank=st.integers(1, 40), scale=st.floats(-12, 6))
def test_kernels_have_at_most_norm_one_and_hardly_less(rows, columns, rank, scale):
    seed = torch.Generator().manual_seed(rows * 1000 + columns)
    low = torch.randn(rows, rank, generator=seed) @ torch.randn(rank, columns, generator=seed)
    kernel = (low * 10**scale).reshape(rows, columns, 1, 1)
    norm = torch.linalg.matrix_norm(with_unit_norm(kernel).flatten(1).double(), 2).item()
    assert rows ** (-1 / 128) - 1e-4 <= norm <= 1 + 1e-5


def test_the_bound_is_reached_where_all_directions_are_alike():
    assert norm_bound(torch.eye(64)).item() == pytest.approx(64 ** (1 / 128), rel=1e-5)
    assert with_unit_norm(torch.zeros(4, 4, 3, 3)).abs().max() == 0


def test_norms_stay_bounded_as_weights_move():
    _, _, problem = digits(victims=1)
    weights = matcher.Matcher(problem, SHORT.recipe(), Workbench(backend="stacked"))
    phase, start = SHORT.recipe().tries[0][0], started(problem)
    fixed = weights._fixed(problem, SHORT.recipe().objective(phase))
    objective = SHORT.recipe().objective(phase)
    calls = Descent(
        lambda at: weights._evaluate(at, fixed, objective)[:2],
        lambda _: None,
        lambda _: None,
        lambda _: None,
        lambda: torch.zeros(1),
    )
    moved = Adam(lr=0.05, signed=True, decay=False).minimize(start, 4, calls)
    kernels = [tensor[0] for name, tensor in moved.items() if tensor.dim() == 5 and tensor.shape[-1] == 3]
    assert len(kernels) == 4
    for kernel in kernels:
        assert torch.linalg.matrix_norm(kernel.flatten(1), 2) > 1.2  # by themselves they are not
        assert torch.linalg.matrix_norm(with_unit_norm(kernel).flatten(1).double(), 2) <= 1 + 1e-5


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 17, 30), (2, 40, 9)])
@pytest.mark.parametrize("boxed", [True, False])
def test_stacked_networks_draw_what_each_draws_alone(shape, boxed):
    low, high = torch.tensor([-1.0]), torch.arange(1.0, shape[0] + 1)[:, None, None]
    problem = as_double(image_problem(victims=3))
    variables = started(replace(problem, shape=shape, box=(low, high) if boxed else None))
    drawn = vmap(NETWORK.decode, in_dims=(0, None))(variables, {})
    assert drawn.shape == (3, 2, *shape)
    torch.testing.assert_close(drawn, torch.stack([NETWORK.decode(of(variables, v), {}) for v in range(3)]))
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0, 0], drawn[0, 1])
    if boxed:
        loud = {**variables, "last.weight": 1e3 * variables["last.weight"]}
        wild = vmap(NETWORK.decode, in_dims=(0, None))(loud, {})
        assert (wild >= low).all()
        assert (wild <= high).all()
        assert (wild.amax((0, 1, 3, 4)) > 0.9 * high.flatten()).all()


def test_noise_and_range_are_never_moved():
    _, _, problem = digits(victims=2)
    variables = started(problem)
    slopes = vmap(grad(lambda one: NETWORK.decode(one, {}).square().sum()))(variables)
    for name in (NOISE, MIDDLE, HALF):
        assert (slopes[name] == 0).all()
    moving = [name for name in variables if name not in (NOISE, MIDDLE, HALF)]
    assert all((slopes[name] != 0).any() for name in moving)


# ---- the attack -------------------------------------------------------------------------------------------------


def test_published_settings():
    recipe = CINet.figure2().recipe()
    (phase,) = recipe.tries[0]
    assert (recipe.match, recipe.priors, len(recipe.tries)) == ("cosine", (), 1)
    assert phase.optimizer == Lowest(Adam(1e-3, signed=True, decay=False))
    assert phase.candidate == UntrainedNetwork()
    assert [made.recipe().steps for made in (CINet.figure2(), CINet.figure3(), CINet.high_resolution())] == [
        4000,
        1000,
        30_000,
    ]
    last = CINet(lowest=False, polish=7).recipe().tries[0]
    assert last[0].optimizer == Adam(1e-3, signed=True, decay=False)
    assert last[1] == polishing(7)


@pytest.mark.parametrize("same_weights", [True, False])
def test_a_victim_alone_is_the_victim_in_the_stack(same_weights):
    problem = as_double(image_problem(same_weights=same_weights))
    whole = run(SHORT, problem, "stacked")
    assert_same(run(SHORT, problem.rows([3]), "stacked"), whole.rows(slice(3, 4)), 1e-7)
    chunked = matcher.match(problem, SHORT.recipe(), Workbench(backend="stacked", chunk=2))
    assert_same(chunked, whole, 1e-7)


def test_the_loop_equals_the_stack():
    problem = as_double(image_problem(conv(), victims=2))
    assert_same(run(SHORT, problem, "loop"), run(SHORT, problem, "stacked"), 1e-6)


def test_the_same_seed_gives_the_same_pictures_to_the_bit():
    problem = image_problem(victims=2)
    torch.manual_seed(1)
    first = run(SHORT, problem, "stacked")
    torch.manual_seed(2)
    assert torch.equal(on_the_way(run(SHORT, problem, "stacked")), on_the_way(first))
    other = run(SHORT, replace(problem, streams=Streams.seeded(2, range(2))), "stacked")
    assert not torch.equal(other.inputs, first.inputs)


def test_pictures_are_in_the_valid_range_without_clamping():
    problem = image_problem()
    low, high = problem.box
    for picture in run(SHORT, problem, "stacked").iterates:
        assert (picture >= low).all()
        assert (picture <= high).all()


def test_labels_may_be_optimized_with_the_weights():
    problem = image_problem(victims=2, batch=2)
    found = run(CINet(steps=4, polish=2, labels="optimized"), replace(problem, labels=None), "stacked")
    assert found.labels.shape == (2, 2)
    assert torch.isfinite(found.cost).all()


class Wandering:
    """An optimizer that visits given places."""

    evaluations = 1

    def __init__(self, places):
        self.places = places

    def minimize(self, start, steps, descent):
        for place in self.places:
            start["x"].copy_(place)
            descent.evaluate(start)
        return start


def test_every_victim_hands_in_its_lowest_place():
    places = [torch.tensor(place) for place in ([[3.0], [1.0], [5.0]], [[1.0], [2.0], [5.0]], [[2.0], [3.0], [5.0]])]
    costs = {5.0: math.nan}

    def evaluate(at):
        cost = torch.tensor([costs.get(value, value) for value in at["x"].flatten().tolist()])
        return at, cost

    descent = Descent(evaluate, lambda _: None, lambda _: None, lambda _: None, lambda: torch.zeros(1))
    start = {"x": torch.tensor([[9.0], [9.0], [7.0]])}
    found = Lowest(Wandering(places)).minimize(start, 3, descent)
    assert found["x"].flatten().tolist() == [1.0, 1.0, 7.0]


def test_lowest_never_costs_more_than_last():
    problem = image_problem()
    low = run(CINet(steps=12, lr=0.05, polish=0), problem, "stacked")
    last = run(CINet(steps=12, lr=0.05, polish=0, lowest=False), problem, "stacked")
    assert (low.cost <= last.cost).all()
    assert (low.cost < last.cost).any()
    # What is handed in is what was lowest on the way or after it.
    assert (low.cost <= low.costs.amin(1) + 1e-6).all()


def test_it_recovers_undefended_digits_and_nothing_from_noise():
    inputs, _, problem = digits("lenet", victims=4)
    std, attack = task_of("lenet").normalization.std, CINet(steps=80, polish=0)
    shown = decibels(run(attack, problem, "stacked"), inputs, std).mean().item()
    nothing = decibels(run(attack, noise_target(problem), "stacked"), inputs, std).mean().item()
    floor = mean_floor(inputs)
    assert shown > floor + 8, (shown, nothing, floor)
    assert nothing < floor, (shown, nothing, floor)


def test_a_polish_of_the_pixels_makes_it_exact():
    inputs, _, problem = digits("lenet", victims=2)
    std = task_of("lenet").normalization.std
    rough = decibels(run(CINet(steps=40, polish=0), problem, "stacked"), inputs, std)
    exact = decibels(run(CINet(steps=40, polish=15), problem, "stacked"), inputs, std)
    assert exact.mean() > rough.mean() + 10, (rough, exact)


def test_drawing_counts_in_the_estimate():
    _, scene = defended(GradientDropout(keep=0.6), victims=4)
    plain, ours = (attack.estimate(scene) for attack in (InvertingGradients(steps=5, restarts=1, polish=0), SHORT))
    assert ours.steps == plain.steps
    convolutions = 2 * 9 * (32 + 32) * 32 * (4 * 4 + 8 * 8)
    assert Plan.of(1, (1, 8, 8)).operations == convolutions
    assert ours.seconds == pytest.approx(plain.seconds + ours.steps * 4 * 3 * convolutions / 2e10)


def test_a_wider_picture_has_narrower_fine_grids():
    plan = Plan.of(1, (3, 256, 256))
    assert plan.grids == tuple((side, side) for side in (4, 8, 16, 32, 64, 128, 256))
    assert plan.channels == (64, 64, 64, 64, 32, 16, 16)


# ---- the attacker who knows the defense ---------------------------------------------------------------------------


def test_trust_that_is_estimated_anew_undoes_gradient_dropout():
    attack = CINet(steps=50, polish=0)
    inputs, scene = defended(GradientDropout(keep=0.6), victims=2)
    aware, blind = quality(attack.run(scene), inputs), quality(attack.run(naive(scene)), inputs)
    assert aware > blind + 8, (aware, blind)


def test_weighing_anew_moves_pixels():
    phases = CINet(steps=60).recipe().tries[0]
    assert [type(CINet().recipe().objective(phase).candidate) for phase in phases] == [UntrainedNetwork, Pixels]
    assert isinstance(phases[1].optimizer, LBFGS)


def test_noise_is_met_by_smoother_pictures():
    stronger = CINet(steps=9, total_variation=5e-3, restarts=2).under_noise()
    assert [recipe.priors for recipe in stronger] == [(TotalVariation(weight),) for weight in SMOOTHER[:2]]
    for recipe in stronger:
        ((phase,),) = recipe.tries
        assert (phase.steps, phase.candidate) == (9, UntrainedNetwork())
    attack = CINet(steps=40, polish=0)
    inputs, scene = defended(GaussianNoise(sigma=0.3), victims=4)
    aware, blind = quality(attack.run(scene), inputs), quality(attack.run(naive(scene)), inputs)
    assert aware > blind + 0.5, (aware, blind)


# ---- what it does not take ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 7, 28), (3, 32, 4), (16,), (2, 3, 16, 16)])
def test_inputs_that_are_no_pictures_or_too_small_are_refused(shape):
    _, scene = defended(GradientDropout(keep=0.6), victims=1)
    layout = replace(scene.public.layout, shape=shape)
    with pytest.raises(FedveilError, match=r"at least 8 × 8 pixels.*the shape " + " × ".join(map(str, shape))):
        SHORT.check(replace(scene, public=replace(scene.public, layout=layout)))


def test_weights_cannot_go_on_from_pictures():
    _, _, problem = digits(victims=1)
    inputs = torch.zeros(1, 1, 1, 8, 8)
    with pytest.raises(FedveilError, match="cannot go on from pictures"):
        NETWORK.start(problem, problem.streams, Found(inputs, {"inputs": inputs}))
    own = started(problem)
    again = NETWORK.start(problem, problem.streams, Found(inputs, own))
    assert all(torch.equal(again[name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize("bad", [{"steps": 0}, {"lr": 0}, {"restarts": 0}, {"polish": -1}, {"labels": "guessed"}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(FedveilError, match=f"CINet: {next(iter(bad))} "):
        CINet(**bad)
