"""Mjölnir on digits: noise is told and taken off, and without noise it is its inversion."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from fedveil.attacks.denoiser import Denoiser
from fedveil.attacks.diffusion import Diffusion
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.mjolnir import Mjolnir, estimated_noise, filled
from fedveil.attacks.noise_level import linear_layers, noise_beyond_rank
from fedveil.defenses.base import Knowledge
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree

from .schooling import lab_of, scene_of

SMALL = Mjolnir(most=900, directions=100, width=64, training=60, at_once=64, steps=3, restarts=1, polish=0)
NOISE = Chain.of(defenses.parse("gaussian-noise:sigma=0.05"))
DROPOUT = Chain.of(defenses.parse("gradient-dropout:keep=0.6"))


@cache
def fitted(batch=1, chain=None, attack=SMALL):
    return attack.fit(lab_of(batch=batch, chain=chain))


def clean(scene):
    return scene_of(lab_of(batch=scene.batch_size), scene.count)[1].updates.gradient


def off(found, wanted):
    """The squared error of gradients, over the squares of the true ones."""
    return float(((found - wanted).norm() / wanted.norm()).square().mean())


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("chain", [NOISE, DROPOUT], ids=str)
def test_held_out_gradients_lose_most_of_their_noise(chain, batch):
    _, scene = scene_of(lab_of(batch=batch, chain=chain), victims=6)
    true, sent = clean(scene), off(scene.updates.gradient, clean(scene))
    naive = off(SMALL.denoised(replace(scene, chain=Chain()), fitted(batch)), true)
    knows = off(SMALL.denoised(scene, fitted(batch, chain)), true)
    assert naive < 0.5 * sent
    assert knows < 0.5 * sent
    assert knows < 1.1 * naive


def test_the_network_adds_to_what_a_linear_estimate_takes_off():
    attack = replace(SMALL, training=400, lr=5e-3)
    _, scene = scene_of(lab_of(chain=NOISE), victims=40)
    learned = attack.fit(lab_of(chain=NOISE))
    linear = {name: tensor for name, tensor in learned.items() if not name.startswith("network.")}
    found, plain = (off(attack.denoised(scene, each), clean(scene)) for each in (learned, linear))
    assert found < 0.97 * plain


@pytest.mark.parametrize("batch", [1, 4])
def test_without_noise_it_is_its_inversion(batch):
    _, scene = scene_of(lab_of(batch=batch), victims=2)
    denoised = SMALL.denoised(scene, fitted(batch))
    assert all(torch.equal(denoised[name], tensor) for name, tensor in scene.updates.gradient.items())
    found = SMALL.run(scene, fitted(batch))
    same = InvertingGradients(steps=3, restarts=1, polish=0).run(scene)
    assert torch.equal(found.inputs, same.inputs)


def test_the_noise_is_read_off_a_linear_layer():
    _, scene = scene_of(lab_of(chain=NOISE), victims=4)
    assert linear_layers(scene.public.model, scene.updates) == ["7.weight"]
    own = [scene.updates.gradient["7.weight"][victim] for victim in range(4)]
    assert [noise_beyond_rank(each, 1) for each in own] == pytest.approx([0.05] * 4, rel=0.15)
    true = clean(scene)["7.weight"]
    assert [noise_beyond_rank(each, 1) for each in true] == [0.0] * 4


def test_batches_of_more_examples_than_classes_tell_it_by_where_gradients_never_are():
    attack = replace(SMALL, training=1)
    lab = lab_of(batch=12)
    learned = attack.fit(lab)
    _, quiet = scene_of(lab, victims=3)
    assert linear_layers(quiet.public.model, quiet.updates) == []
    principal = Denoiser.read(learned, Diffusion()).principal
    outside = float(learned["outside"])

    def told(scene):
        each = (scene.rows([victim]) for victim in range(3))
        return [estimated_noise(own, own.updates.gradient.flat(), principal, outside) for own in each]

    noisy = scene_of(lab_of(batch=12, chain=NOISE), victims=3)[1]
    assert told(replace(noisy, chain=Chain())) == pytest.approx([0.05] * 3, rel=0.15)
    assert max(told(quiet)) < 0.01


def test_who_knows_the_defense_measures_its_noise():
    assert float(fitted()["sigma"]) == -1
    assert float(fitted(chain=NOISE)["sigma"]) == pytest.approx(0.05, rel=0.05)


def test_entries_that_are_not_trusted_are_filled_in_by_the_others():
    principal = Denoiser.read(fitted(), Diffusion()).principal
    _, scene = scene_of(lab_of(), victims=1)
    true = scene.updates.gradient
    trusted = true.map(lambda g: Streams.seeded(1, [0]).chance_like(g, 0.5))
    broken = true.combine(trusted, lambda g, kept: torch.where(kept > 0, g, 99.0))
    found = filled(principal, Knowledge(broken, trusted))
    kept = trusted.flat() > 0
    assert torch.equal(found[kept], true.flat()[kept])
    assert off(true.unflat(found), true) < 0.1
    assert filled(principal, Knowledge(broken, trusted.map(torch.ones_like))) == pytest.approx(broken.flat())


def test_a_draw_differs_from_the_mean_and_repeats():
    _, scene = scene_of(lab_of(chain=NOISE), victims=2)
    drawing = replace(SMALL, noise=True)
    mean = SMALL.denoised(scene, fitted(chain=NOISE))
    drawn, again = (drawing.denoised(scene, fitted(chain=NOISE)) for _ in range(2))
    assert torch.equal(drawn.flat(), again.flat())
    assert not torch.allclose(drawn.flat(), mean.flat())
    assert off(mean, clean(scene)) < off(drawn, clean(scene))


def test_the_seed_decides_all_and_victims_do_not_depend_on_company():
    tiny = replace(SMALL, training=3, most=100, directions=10)
    learned, again = (tiny.fit(lab_of(chain=DROPOUT)) for _ in range(2))
    assert all(torch.equal(again[name], tensor) for name, tensor in learned.items())
    _, scene = scene_of(lab_of(chain=DROPOUT), victims=3)
    denoised = tiny.denoised(scene, learned)
    one = Tree.concat([tiny.denoised(scene.rows([victim]), learned) for victim in range(3)])
    assert torch.equal(denoised.flat(), one.flat())


def test_torch_is_not_asked_for_numbers_and_progress_is_told():
    told, before = [], torch.get_rng_state()
    replace(SMALL, training=3).fit(replace(lab_of(), report=lambda done, total: told.append((done, total))))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert torch.equal(torch.get_rng_state(), before)


def test_no_auxiliary_data_is_one_line():
    with pytest.raises(FedveilError, match=r"mjolnir learns from auxiliary pictures, and there are 0: use another"):
        SMALL.fit(replace(lab_of(), auxiliary=None))
    with pytest.raises(FedveilError, match="what its `fit` returned"):
        SMALL.run(scene_of(lab_of())[1])


def test_published_settings():
    published = Mjolnir.published()
    assert published.inversion == "dlg"
    assert published.noise
    assert published.recipe().labels == "optimized"
    assert published.needs == {"auxiliary", "classes"}
    assert Mjolnir().needs == {"auxiliary", "labels"}
    assert Diffusion() == Diffusion(steps=1000, first=1e-4, last=0.02)


def test_work_is_estimated():
    _, scene = scene_of(lab_of(), victims=2)
    work = SMALL.estimate(scene)
    assert work.fit_seconds > 0
    assert work.steps == 3
    assert Mjolnir().estimate(scene).fit_seconds > work.fit_seconds


def test_updates_of_a_local_round_are_taken():
    lab = lab_of(batch=2, kind="delta", lr=(0.1,), batch_sizes=(2,))
    learned = replace(SMALL, training=2, most=100, directions=10).fit(lab)
    inputs, scene = scene_of(lab, victims=2)
    assert SMALL.run(scene, learned).inputs.shape == inputs.shape
