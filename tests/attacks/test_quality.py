"""What the attacks recover from real digits: above the floor undefended, and what a defense and knowing it change."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.attacks.dlg import DLG
from fedveil.attacks.idlg import IDLG
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.optimizers import Adam
from fedveil.attacks.polish import polishing
from fedveil.attacks.recipe import Phase
from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.defenses.base import Facts
from fedveil.defenses.chain import Chain
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.leakage.floors import mean_image
from fedveil.leakage.metrics import psnr
from fedveil.streams import Streams
from fedveil.tree import Tree

from .small import SMOOTH, decibels, digits, noise_target, ones, problem_of, run, task_of

FACTS = Facts(kind="gradient", batch_size=1)
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def defended(problem, inputs, defense, seed=11):
    """The naive and the adaptive attacker's problem after a defense acted on every victim's gradient."""
    chain = Chain.of(defense)
    engine = Engine(problem.model, F.cross_entropy, backend="stacked")
    streams = Streams.seeded(seed, range(problem.count))
    batch = ClientBatch(engine, problem.params, problem.buffers, inputs, problem.labels, streams)
    observed = chain.step(batch, chain.new_states()).update
    known = chain.knowledge(observed, FACTS)
    naive = replace(problem, target=observed, weight=ones(observed))
    return naive, replace(problem, target=known.target, weight=known.weight, reweight=known.reweight)


def one_stack(problems):
    """Several problems with the same victims as one: their attacks share a function."""
    first = problems[0]
    total = len(problems) * first.count
    return replace(
        first,
        params=Tree.expand(first.params.row(0), total),
        buffers=Tree.expand(first.buffers.row(0), total) if len(first.buffers) else first.buffers,
        target=Tree.concat([problem.target for problem in problems]),
        weight=Tree.concat([problem.weight for problem in problems]),
        labels=torch.cat([problem.labels for problem in problems]),
        streams=Streams.seeded(1, range(total)),
    )


def roles(inputs, problem, std, attack, backend, defense):
    """Mean PSNR of each image for ceiling, floor, naive and adaptive, attacked in one stack."""
    naive, adaptive = defended(problem, inputs, defense)
    names = ("ceiling", "floor", "naive", "adaptive")
    whole = one_stack([problem, noise_target(problem), naive, adaptive])
    found = run(attack, whole, backend)
    count = problem.count
    each = [found.rows(slice(i * count, (i + 1) * count)) for i in range(4)]
    return {name: decibels(part, inputs, std).mean().item() for name, part in zip(names, each, strict=True)}


@cache
def digits_roles():
    inputs, _, problem = digits("lenet", victims=8)
    attack = InvertingGradients(steps=250)
    std = task_of("lenet").normalization.std
    return roles(inputs, problem, std, attack, "stacked", GradientDropout(keep=0.6, sigma=5e-3))


def mean_floor(inputs):
    made = task_of("lenet")
    mean = mean_image(made.train.batch(range(len(made.train)))[0])
    images = inputs.flatten(0, 1)
    return psnr(mean.expand_as(images), images, made.normalization.std).mean().item()


def test_inverting_gradients_recovers_undefended_digits_and_nothing_from_noise():
    found, floor = digits_roles(), mean_floor(digits("lenet", victims=8)[0])
    assert found["ceiling"] > floor + 8, f"{found}, mean image {floor:.1f}"
    assert found["floor"] < floor, f"{found}, mean image {floor:.1f}"


def test_knowing_gradient_dropout_helps():
    found = digits_roles()
    assert found["adaptive"] > found["naive"] + 1.5, found
    assert found["adaptive"] < found["ceiling"], found


class Faint(nn.Module):
    """A model whose gradient hardly tells its inputs apart, as those of trained models: slopes are small everywhere."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(0.1 * inputs)


def test_small_slopes_do_not_stop_the_polish():
    made = task_of("lenet")
    inputs, targets, _ = digits("lenet", victims=4)
    problem = problem_of(Faint(made.model), inputs, targets, box=made.normalization.box())
    attack = InvertingGradients(steps=60, restarts=1, signed=False, polish=8)
    before, after = (
        decibels(run(each, problem, "stacked"), inputs, made.normalization.std).mean()
        for each in (replace(attack, polish=0), attack)
    )
    assert after > before + 15


# From one start L-BFGS finds two thirds to nine tenths of the images.
ATTEMPTS = [(DLG(steps=40, restarts=3), 0.7), (IDLG(steps=40, restarts=3), 1.0)]


@pytest.mark.parametrize("attack, right_labels", ATTEMPTS, ids=["dlg", "idlg"])
@pytest.mark.parametrize("model", ["lenet", SMOOTH])
def test_dlg_and_idlg_recover_most_single_digits(attack, right_labels, model):
    inputs, targets, problem = digits(model, victims=12)
    found = run(attack, replace(problem, labels=None), "stacked")
    shown = decibels(found, inputs, task_of(model).normalization.std)
    assert (shown > 25).double().mean() >= 0.7, shown
    assert (found.labels == targets).double().mean() >= right_labels


def test_published_settings_of_inverting_gradients():
    recipe = InvertingGradients().recipe()
    assert [phases[0].optimizer.signed for phases in recipe.tries] == [True, False]
    assert [phases[1] for phases in recipe.tries] == [polishing(20)] * 2
    assert recipe.steps == 1620
    assert InvertingGradients.fedem().recipe().tries == ((Phase(1600, Adam(0.1, signed=True, decay=False)),),)
    assert InvertingGradients.fedbarre().recipe().steps == 2500
    assert InvertingGradients.gradient_dropout().recipe().steps == 4000


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(not (DATA / "mnist").exists(), reason="the MNIST files are not there")
def test_calibration_on_mnist():
    """Test images 0 to 31 one by one, untrained LeNet, 1600 steps.

    The ceiling hangs on the draw of the weights: with signed steps alone 26.7, 44.1, 56.1 and 66.0 dB for the seeds 0
    to 3 of the model. Seed 0, the hardest of them, is used here.
    """
    made = task_of("lenet", "mnist", DATA)
    inputs, targets = made.test.batch(range(32))
    inputs, targets = inputs[:, None], targets[:, None]
    problem = problem_of(made.model, inputs, targets, box=made.normalization.box())
    defense = GradientDropout(keep=0.6, sigma=5e-3)
    found = roles(inputs, problem, made.normalization.std, InvertingGradients(), "compiled", defense)
    assert found["ceiling"] >= 28, found
    assert found["floor"] <= 8, found
    assert found["naive"] <= 15, found
    assert found["adaptive"] >= 20, found
