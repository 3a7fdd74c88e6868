"""LTI on digits: what it learns, from what, and that nothing but the seed decides."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import fedveil as fv
from fedveil.attacks.inverter import Inverter
from fedveil.attacks.lti import LTI
from fedveil.attacks.matched import assigned
from fedveil.attacks.mjolnir import Mjolnir
from fedveil.attacks.practice import Batches, Practice, pictures
from fedveil.defenses.chain import Chain
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.errors import FedveilError
from fedveil.leakage.metrics import psnr
from fedveil.registry import attacks, defenses
from fedveil.streams import Streams

from .schooling import lab_of, noise_in_place, scene_of
from .small import task_of

SMALL = LTI(width=64, steps=150, at_once=32, directions=128, most=800)
TINY = LTI(width=16, steps=6, at_once=8, directions=12, most=60, bins=200)
DROPOUT = Chain.of(GradientDropout(keep=0.6))


@cache
def fitted(attack=SMALL, batch=1, chain=None):
    return attack.fit(lab_of(batch=batch, chain=chain))


def decibels(made, inputs):
    flat, wanted = made.flatten(2), inputs.flatten(2)
    partners = wanted.gather(1, assigned(flat, wanted)[..., None].expand_as(wanted))
    std = task_of("lenet").normalization.std
    pairs = (each.reshape(-1, 1, 8, 8) for each in (flat, partners))
    return psnr(*pairs, std).mean().item()


def mean_pictures(inputs, labels):
    """What the mean picture reaches, and what that of each label does: an attacker may know the labels."""
    train = task_of("lenet").train
    pictures, known = train.batch(range(len(train)))
    own = torch.stack([pictures[known == label].mean(0) for label in range(10)])[labels]
    return decibels(pictures.mean(0).expand_as(inputs), inputs), decibels(own, inputs)


@pytest.mark.parametrize("batch", [1, 3])
def test_it_beats_the_mean_picture_and_tells_nothing_of_noise(batch):
    inputs, scene = scene_of(lab_of(batch=batch), victims=12)
    learned, (floor, of_labels) = fitted(batch=batch), mean_pictures(inputs, scene.labels)
    found = decibels(SMALL.run(scene, learned).inputs, inputs)
    assert found > floor + 3
    assert found > of_labels + 0.5
    assert decibels(SMALL.run(noise_in_place(scene), learned).inputs, inputs) < of_labels


def test_who_trains_under_the_defense_gets_more_of_it():
    signs = Chain.of(defenses.parse("sign-compression"))
    inputs, scene = scene_of(lab_of(chain=signs), victims=12)
    naive, knows = (decibels(SMALL.run(scene, fitted(chain=chain)).inputs, inputs) for chain in (None, signs))
    assert knows > naive + 1
    assert knows > mean_pictures(inputs, scene.labels)[0] + 2


def test_the_published_network_learns_too():
    attack = replace(SMALL, plain=True, labels="none", steps=300)
    inputs, scene = scene_of(lab_of(), victims=12)
    found = attack.run(replace(scene, labels=None), fitted(attack))
    assert decibels(found.inputs, inputs) > mean_pictures(inputs, scene.labels)[0] + 1
    assert found.labels.shape == (12, 1)
    assert (found.labels == scene.labels).float().mean() > 0.5
    assert LTI.published().plain
    assert LTI.published().width == 3000


def test_labels_that_are_read_off_do_as_well():
    attack = replace(SMALL, labels="recovered")
    _, scene = scene_of(lab_of(), victims=4)
    told = SMALL.run(scene, fitted())
    read = attack.run(replace(scene, labels=None), fitted())
    assert torch.equal(read.labels, told.labels)
    assert torch.equal(read.inputs, told.inputs)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_order_of_the_labels_orders_the_pictures(batch):
    _, scene = scene_of(lab_of(batch=batch), victims=5)
    order = torch.arange(batch).flip(0)
    found, turned = (
        TINY.run(each, fitted(TINY, batch)) for each in (scene, replace(scene, labels=scene.labels[:, order]))
    )
    assert torch.equal(turned.labels, scene.labels[:, order])
    single = torch.tensor([len(set(labels)) == batch for labels in scene.labels.tolist()])
    assert single.any()
    assert torch.equal(turned.inputs[single], found.inputs[single][:, order])


@pytest.mark.parametrize("chain", [None, DROPOUT, Chain.of(defenses.parse("fedem:steps=2"))], ids=str)
def test_the_seed_decides_all(chain):
    learned, again = (TINY.fit(lab_of(batch=2, chain=chain)) for _ in range(2))
    assert learned.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in learned.items())
    other = TINY.fit(replace(lab_of(batch=2, chain=chain), streams=Streams.seeded(4, [0], "lab")))
    assert not all(torch.equal(other[name], tensor) for name, tensor in learned.items())


def test_victims_are_attacked_alike_in_any_company():
    _, scene = scene_of(lab_of(), victims=5)
    whole = TINY.run(scene, fitted(TINY)).inputs
    parts = torch.cat([TINY.run(scene.rows([victim]), fitted(TINY)).inputs for victim in range(5)])
    assert torch.equal(whole, parts)


def test_torch_is_not_asked_for_numbers():
    before = torch.get_rng_state()
    TINY.fit(lab_of(chain=DROPOUT))
    assert torch.equal(torch.get_rng_state(), before)


def test_progress_is_told():
    told = []
    TINY.fit(replace(lab_of(), report=lambda done, total: told.append((done, total))))
    assert told[-1] == (6, 6)
    assert len(told) == 6


def test_what_is_held_out_is_not_trained_on():
    train, held_out = pictures(lab_of(), 500, "lti")
    assert (len(train), len(held_out)) == (500, 50)
    seen = {picture.numpy().tobytes() for picture in train.inputs}
    known = [picture.numpy().tobytes() in seen for picture in held_out.inputs]
    assert sum(known) <= 1  # copies of one digit may be in the data


def test_no_auxiliary_data_is_one_line():
    with pytest.raises(FedveilError, match=r"lti learns from auxiliary pictures, and there are 0: use another attack$"):
        TINY.fit(replace(lab_of(), auxiliary=None))
    with pytest.raises(FedveilError, match="what its `fit` returned"):
        TINY.run(scene_of(lab_of())[1])
    with pytest.raises(FedveilError, match="labels are not known"):
        TINY.run(replace(scene_of(lab_of())[1], labels=None), fitted(TINY))


def test_the_threat_model_says_what_it_has():
    assert attacks.load("lti")().threat.words == "labels, auxiliary data"
    assert LTI(labels="none").threat.words == "auxiliary data"
    assert LTI(labels="recovered").threat.words == "auxiliary data, reads the labels off the update"


@pytest.mark.parametrize("attack", [TINY, Mjolnir(most=60, directions=8, width=8, training=2, steps=2, polish=0)])
def test_what_was_learned_survives_the_store(attack, tmp_path, monkeypatch):
    made = fv.task("digits", model="lenet", clients=2, limit=200)
    settings = fv.AuditSettings(victims=2, source="test", link=False, reference="none")

    def audited():
        found = fv.audit(made, "gradient-dropout:keep=0.6", attack, settings=settings, train=False, store=tmp_path)
        return [(row.role, row.metrics["psnr"].mean) for row in found.result.rows]

    first = audited()
    assert {"ceiling", "naive", "adaptive", "noise-floor"} <= {role for role, _ in first}
    for kept in (tmp_path / "attack").rglob("*"):  # what was found is gone, what was learned is there
        if kept.is_file():
            kept.unlink()
    monkeypatch.setattr(type(attack), "fit", lambda self, lab: pytest.fail("it learns again"))
    assert audited() == first


# ---- practice -------------------------------------------------------------------------------------------------


def some(count=12):
    inputs, labels = task_of("lenet").train.batch(range(count))
    return Batches(inputs[:, None], labels[:, None])


def test_updates_of_batches_are_means_unless_something_binds_the_pictures():
    assert Practice(lab_of(batch=3), 3, some()).adds_up(some())
    assert Practice(lab_of(batch=3, chain=DROPOUT), 3, some()).adds_up(some())
    assert not Practice(lab_of(batch=1), 1, some()).adds_up(some())
    assert not Practice(lab_of(batch=3, chain=Chain.of(defenses.parse("fedem:steps=2"))), 3, some()).adds_up(some())
    assert not Practice(lab_of(batch=3, chain=Chain.of(defenses.parse("dp-sgd"))), 3, some()).adds_up(some())
    assert not Practice(lab_of(batch=3, kind="weights"), 3, some()).adds_up(some())


@pytest.mark.parametrize("options", [{}, {"kind": "weights", "weight_decay": 0.1}, {"kind": "delta"}], ids=str)
@pytest.mark.parametrize("defense", ["gaussian-noise:sigma=0.05", "gradient-dropout:keep=0.6", "dp-sgd"])
def test_noise_put_on_later_has_the_law_of_what_is_sent(defense, options):
    practice = Practice(lab_of(batch=2, chain=Chain.of(defenses.parse(defense)), **options), 2, some())
    assert practice.renews
    one = some().joined(torch.tensor([[0, 1]] * 600))
    sent = practice.sent(one, Streams.seeded(1, range(600))).flat()
    renewed = practice.renewed(practice.bare(one, Streams.seeded(2, range(600))), Streams.seeded(3, range(600))).flat()
    clear = practice.clear(one.rows(slice(0, 1)), Streams.seeded(2, [0])).flat()
    spread = sent.std(0)
    assert torch.allclose(renewed.mean(), sent.mean(), atol=5 * float(spread.mean()) / (600 * sent.shape[1]) ** 0.5)
    assert float(((renewed.mean(0) - sent.mean(0)) / spread.clamp_min(1e-6)).square().mean()) < 2.4 / 600
    assert float((renewed.var(0) / sent.var(0).clamp_min(1e-12)).median()) == pytest.approx(1, abs=0.02)
    assert float(((clear[0] - sent.mean(0)) / spread.clamp_min(1e-6)).square().mean()) < 1.3 / 600


def test_what_no_noise_can_be_put_on_is_made_anew():
    practice = Practice(lab_of(chain=Chain.of(defenses.parse("fedem:steps=2"))), 1, some())
    assert practice.random
    assert not practice.renews
    quiet = Practice(lab_of(chain=Chain.of(defenses.parse("gradient-pruning"))), 1, some())
    assert not quiet.random


def test_an_attacker_may_learn_a_whole_local_round():
    lab = lab_of(batch=4, kind="weights", lr=(0.1, 0.1), batch_sizes=(2, 2))
    inputs, scene = scene_of(lab, victims=3)
    found = TINY.run(scene, TINY.fit(lab))
    assert found.inputs.shape == inputs.shape
    assert found.inputs.isfinite().all()


def test_pictures_are_asked_for_by_label_and_number():
    network = Inverter(False, 3, 4, None)
    asked = network._asked(torch.tensor([[1, 1, 3]]))
    assert asked[0, :, :4].argmax(1).tolist() == [1, 1, 3]
    assert asked[0, :, 8:].argmax(1).tolist() == [0, 1, 0]
    assert torch.allclose(asked[0, 0, 4:8], torch.tensor([0, 2 / 3, 0, 1 / 3]))
