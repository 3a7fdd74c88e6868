"""Attackers who saw several messages about each batch: what each kind of attack makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedveil.attacks.analytic import Analytic
from fedveil.attacks.choosing import explanations, plausible
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.informed import tries_of
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.lab import Lab
from fedveil.attacks.learned_linear import LearnedLinear, Play, Sketch
from fedveil.attacks.link import LinkTest
from fedveil.attacks.problem import Problem
from fedveil.attacks.scene import Scene, Workbench
from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import mean_of
from fedveil.federation.plan import Plan
from fedveil.federation.probe import Victims, probe
from fedveil.federation.steps import Prepared
from fedveil.leakage.metrics import psnr
from fedveil.registry import defenses
from fedveil.streams import Streams

from . import linking
from .small import digits, scene_of, task_of

QUICK = InvertingGradients(steps=40, restarts=1, polish=6)
NAMES = [name for name in defenses.entries() if not name.startswith("test-")]


def seen(defense, views, victims=4, batch=1, model="lenet"):
    """(originals (V, B, ...), the scene of one who knows the defense and saw so many messages about each batch)."""
    inputs, targets, problem = digits(model, victims=victims, batch=batch)
    chain = Chain.of(defense)
    engine = Engine(problem.model, F.cross_entropy, backend="stacked")
    messages = []
    for view in range(views):
        streams = Streams.seeded(11, range(victims), "view", view)
        client = ClientBatch(engine, problem.params, problem.buffers, inputs, targets, streams)
        messages.append(chain.step(client, chain.new_states()).update)
    scene = scene_of(replace(problem, target=messages[0]), chain=chain, bench=Workbench(backend="stacked"))
    return inputs, several(scene, [replace(scene.updates, message=message) for message in messages])


def several(scene, updates):
    """The scene of one who saw these messages."""
    return replace(scene, updates=mean_of(updates), views=tuple(updates)) if len(updates) > 1 else scene


def naive(scene):
    return replace(scene, chain=Chain())


def quality(found, inputs, model="lenet"):
    return psnr(found.inputs.flatten(0, 1), inputs.flatten(0, 1), task_of(model).normalization.std).mean().item()


# ---- what it is worth ---------------------------------------------------------------------------------------


def test_noise_averages_out_for_those_who_know_it_and_for_those_who_do_not():
    few, many = (seen("gaussian-noise:sigma=0.02", views, victims=3) for views in (1, 16))
    for who in (naive, lambda scene: scene):
        found = [quality(QUICK.run(who(scene)), inputs) for inputs, scene in (few, many)]
        assert found[1] > found[0] + 4, found


def test_decoys_are_told_from_gradients_by_whether_they_agree():
    """Decoys of the gradient's own spread: in a single message nothing tells them apart."""
    defense = "gradient-dropout:keep=0.3,match_spread=true"
    few, many = (seen(defense, views, victims=3) for views in (1, 6))
    found = [quality(QUICK.run(scene), inputs) for inputs, scene in (few, many)]
    assert found[1] > found[0] + 6, found


def test_the_mean_of_a_data_defense_is_attacked():
    inputs, scene = seen("fedem:radius=2.0", 3, victims=2)
    assert quality(replace(QUICK, polish=3).run(scene), inputs) > 15


def test_a_linear_layer_gives_its_input_through_noise():
    defense = "gaussian-noise:sigma=0.01"
    found = []
    for views in (1, 16):
        inputs, scene = seen(defense, views, model="mlp:hidden=[64]")
        found.append(quality(Analytic().run(scene), inputs, "mlp:hidden=[64]"))
    assert found[1] > found[0] + 5, found


# ---- what is matched ----------------------------------------------------------------------------------------


def test_the_naive_match_is_that_of_the_mean_and_no_way_is_tried_twice():
    _, scene = seen("gaussian-noise:sigma=0.1", 3, victims=2)
    mean = scene.updates.gradient
    for each in (Problem.of(naive(scene)), Problem.of(scene)):
        assert all(torch.equal(each.target[name], tensor) for name, tensor in mean.items())
    tries = tries_of(scene, Problem.of(scene), QUICK.recipe(), QUICK.under_noise())
    assert len(tries.alike) == 1
    assert len(tries.stronger) == len(QUICK.under_noise())


def test_victims_keep_their_own_messages():
    _, scene = seen("gradient-dropout:keep=0.3", 3, victims=3)
    one, whole = Problem.of(scene.rows([2])), Problem.of(scene).rows([2])
    for part in ("target", "weight"):
        for name, tensor in getattr(one, part).items():
            torch.testing.assert_close(tensor, getattr(whole, part)[name])
    assert len(one.views) == len(whole.views) == 3
    made = one.target.map(lambda tensor: tensor * 0.9)
    torch.testing.assert_close(one.reweighed(made).weight["0.weight"], whole.reweighed(made).weight["0.weight"])


def test_chunks_of_victims_do_not_matter():
    _, scene = seen("gradient-dropout:keep=0.3", 3, victims=3)
    short = replace(QUICK, steps=4, signed=False, polish=1)
    together, alone = short.run(scene), short.run(scene.rows([1]))
    torch.testing.assert_close(together.inputs[1:2], alone.inputs, rtol=1e-2, atol=1e-2)


# ---- linking and choosing ------------------------------------------------------------------------------------


def linked(spec, views, victims=8, settings=linking.FEDSGD, among=20):
    """A scene with candidates of one who saw so many messages, and where the originals stand among these."""
    of = linking.digits()
    scene, place = linking.scene_of(of, spec, settings, victims=victims, among=among)
    params = {name: p.detach() for name, p in of.model.named_parameters() if p.requires_grad}
    engine = Engine(of.model, of.loss, backend="loop", perturb=of.perturb)
    at = Prepared(Plan(of, Chain.of(spec), settings), engine)
    made = [probe(at, params, {}, 1, Victims(victims), view=view).defended for view in range(views)]
    return several(scene, made), place


@pytest.mark.parametrize("spec", ["gaussian-noise:sigma=0.3", "gradient-dropout:keep=0.1", "sign-compression:flip=0.4"])
def test_log_likelihoods_add_up(spec):
    scene, _ = linked(spec, 3, victims=2, among=5)
    whole = LinkTest().run(scene).scores
    parts = [LinkTest().run(replace(scene, updates=view, views=())).scores for view in scene.views]
    torch.testing.assert_close(whole, sum(parts[1:], parts[0]))


def test_more_messages_are_linked_more_often():
    shares = []
    for views in (1, 16):
        scene, place = linked("gaussian-noise:sigma=0.5", views, victims=24)
        shares.append(float(LinkTest().run(scene).linked(place).double().mean()))
    assert shares[1] > shares[0] + 0.3, shares


@pytest.mark.parametrize("name", NAMES)
def test_every_defense_is_read_from_several_messages(name):
    spec = "ppfa:at=gradient" if name == "ppfa" else name
    settings = linking.FEDSGD if name not in ("spm", "pnpm", "ldp-fl") else linking.WEIGHTS
    scene, _ = linked(spec, 3, victims=2, settings=settings, among=4)
    found = LinkTest().run(scene)
    assert torch.isfinite(found.scores).all()
    known = scene.knowledge()
    assert all(torch.isfinite(tensor).all() for tree in (known.target, known.weight) for tensor in tree.values())


def test_the_mean_tells_what_the_messages_lying_apart_would_hide():
    """A reconstruction that is off by little is plausible beside one message, and not beside sixteen."""
    inputs, one = seen("gaussian-noise:sigma=0.05", 1)
    _, many = seen("gaussian-noise:sigma=0.05", 16)
    off = Reconstruction(0.7 * inputs, one.labels, torch.zeros(len(inputs)), seconds=0.0)
    true = replace(off, inputs=inputs)
    assert plausible(one, true).all()
    assert plausible(many, true).all()
    assert plausible(one, off).sum() >= plausible(many, off).sum() + 2
    scores = explanations(many, [off, true])
    assert bool((scores[:, 1] > scores[:, 0]).all())


# ---- attacks that learn -------------------------------------------------------------------------------------


def lab_of(scene: Scene, views: int = 1) -> Lab:
    held_out = task_of("lenet").train.subset(range(400))
    return Lab(scene.public, scene.updates.rows([0]), held_out, Streams.seeded(5, [0], "lab"), scene.chain, views=views)


def test_the_learned_map_learns_from_means_of_as_many_messages():
    attack, found = LearnedLinear(most=150), []
    for views in (1, 16):
        inputs, scene = seen("gaussian-noise:sigma=0.3", views)
        found.append(quality(attack.run(scene, attack.fit(lab_of(scene))), inputs))
    assert found[1] > found[0] + 1, found


def test_what_a_learned_map_sees_is_a_mean():
    def around(views):
        inputs, scene = seen("gaussian-noise:sigma=0.1", views, victims=1)
        play = Play(
            scene, inputs[[0, 0]], scene.labels[0], Sketch.of(scene.updates.before, 512), Streams.seeded(2, range(2))
        )
        rows = play.sent()
        return float((rows[0] - rows[1]).square().mean())  # the same picture twice: what differs is noise

    assert around(1) / around(16) == pytest.approx(16, rel=0.3)


def test_a_lab_makes_means_too():
    inputs, scene = seen("gaussian-noise:sigma=0.1", 1, victims=2)
    streams = Streams.seeded(4, range(2))

    def off(views):
        made = lab_of(scene, views).messages(inputs, scene.labels, streams.fold(views))
        return float((made - lab_of(replace(scene, chain=Chain())).messages(inputs, scene.labels, streams)).norm()[0])

    assert off(1) / off(9) == pytest.approx(3, rel=0.1)
