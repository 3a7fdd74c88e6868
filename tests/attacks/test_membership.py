"""Tests of membership on digits: what each finds where there is something to find, and nothing where there is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.attacks.base import Attack
from fedveil.attacks.confidence import confidences
from fedveil.attacks.fedmia import FedMIA, beside_others
from fedveil.attacks.finding import Membership
from fedveil.attacks.lab import Lab
from fedveil.attacks.lira import LiRA, beyond
from fedveil.attacks.loss_threshold import LossThreshold
from fedveil.attacks.scene import Scene, Suspects
from fedveil.attacks.update_alignment import UpdateAlignment
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.settings import FederationSettings
from fedveil.leakage.membership import AUC, LEFT_OUT, MEMBER, OTHER, told
from fedveil.registry import attacks, defenses
from fedveil.streams import Streams
from fedveil.tasks.examples import Examples
from fedveil.tree import Tree

from .linking import DELTA, FEDSGD, WEIGHTS, digits, naive, noise_instead, scene_of

NAMES = [name for name in defenses.entries() if not name.startswith("test-")]
OTHERS = 120


def in_question(
    spec: str | None = None, settings: FederationSettings = FEDSGD, *, victims: int = 8, batch: int = 1
) -> tuple[Scene, Tensor]:
    """Updates of clients, their examples among others, and which of them are members of which."""
    of = digits()
    scene, place = scene_of(of, spec, settings, victims=victims, batch=batch, among=2)
    assert scene.candidates is not None
    assert isinstance(scene.candidates.inputs, Tensor)
    rows = torch.arange(victims)
    own, labels = scene.candidates.inputs[rows, place], scene.candidates.labels[rows, place]
    others, their = of.test.batch(range(OTHERS))
    assert isinstance(others, Tensor)
    inputs, marks = torch.cat([own.flatten(0, 1), others]), torch.cat([labels.flatten(), their])
    owner = rows.repeat_interleave(batch)
    kinds = torch.cat(
        [torch.where(rows[:, None] == owner, MEMBER, LEFT_OUT), torch.full((victims, OTHERS), OTHER)], dim=1
    )
    order = torch.randperm(len(marks), generator=torch.Generator().manual_seed(0))
    asked = replace(scene, candidates=None, suspects=Suspects(inputs[order], marks[order]))
    return asked, kinds[:, order]


def auc(attack: Attack, scene: Scene, kinds: Tensor) -> float:
    found = attack.run(scene)
    assert isinstance(found, Membership)
    return told(found.scores.numpy(), kinds.numpy(), resamples=10).metrics[AUC].mean


# ---- updates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", [UpdateAlignment(), FedMIA()], ids=lambda attack: attack.name)
@pytest.mark.parametrize("settings", [FEDSGD, WEIGHTS, DELTA], ids=["fedsgd", "weights", "delta"])
def test_the_only_example_of_an_update_is_told(attack: Attack, settings: FederationSettings) -> None:
    assert auc(attack, *in_question(settings=settings)) > 0.99


@pytest.mark.parametrize("attack", [UpdateAlignment(), FedMIA()], ids=lambda attack: attack.name)
def test_the_examples_of_a_batch_are_told_but_not_those_of_noise(attack: Attack) -> None:
    scene, kinds = in_question(batch=4, victims=12)
    assert auc(attack, scene, kinds) > 0.85
    assert 0.35 < auc(attack, noise_instead(scene), kinds) < 0.65
    exchanged = kinds[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    others = torch.where(kinds == OTHER, OTHER, exchanged)
    assert auc(attack, scene, others) < auc(attack, scene, kinds) - 0.15  # another client's are no members


def test_the_score_is_the_cosine_of_plain_gradients() -> None:
    scene, _ = in_question(batch=2, victims=2)
    assert scene.suspects is not None
    assert isinstance(scene.suspects.inputs, Tensor)
    model, found = scene.public.model, UpdateAlignment().run(scene).scores
    for place in (0, 7, 50):
        loss = F.cross_entropy(model(scene.suspects.inputs[place : place + 1]), scene.suspects.labels[[place]])
        gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])
        for victim in range(2):
            update = scene.updates.message.flat()[victim]
            assert float(found[victim, place]) == pytest.approx(
                float(F.cosine_similarity(gradient, update, 0)), abs=1e-5
            )


@pytest.mark.parametrize("name", NAMES)
def test_every_defense_is_read(name: str) -> None:
    spec = "ppfa:at=gradient" if name == "ppfa" else name
    settings = FEDSGD
    try:
        Chain.of(spec).check_message(settings.message)
    except FedveilError:
        settings = WEIGHTS
    scene, _ = in_question(spec, settings, victims=3, batch=2)
    assert scene.suspects is not None
    few = replace(scene, suspects=Suspects(scene.suspects.inputs[:5], scene.suspects.labels[:5]))  # type: ignore[index]
    for knowing in (few, naive(few)):
        for attack in (UpdateAlignment(), FedMIA()):
            found = attack.run(knowing)
            assert found.scores.shape == (3, 5)
            assert found.scores.isfinite().all()
            assert torch.equal(found.scores, attack.run(knowing).scores)


def test_who_knows_the_defense_tells_more() -> None:
    scene, kinds = in_question("spm:epsilon=0.3", WEIGHTS, batch=2, victims=12)
    informed, blind = auc(UpdateAlignment(), scene, kinds), auc(UpdateAlignment(), naive(scene), kinds)
    assert informed > 0.85
    assert informed > blind + 0.1


def test_other_updates_are_the_reference_of_fedmia() -> None:
    """An example that every update points to is nobody's; one that a single update points to is that one's."""
    aligned = torch.tensor([[0.9, 0.5, 0.1], [0.9, 0.0, 0.1], [0.9, 0.1, 0.2], [0.8, 0.05, 0.1]], dtype=torch.float64)
    scores = beside_others(aligned)
    assert scores[0].argmax() == 1
    others = aligned[1:, 1]
    assert float(scores[0, 1]) == pytest.approx(float((0.5 - others.mean()) / others.std(correction=0)))


def test_fedmia_needs_other_updates() -> None:
    scene, _ = in_question(victims=2)
    with pytest.raises(FedveilError, match="beside others"):
        FedMIA().check(scene)


# ---- the model -----------------------------------------------------------------------------------------------


def trained(count: int, steps: int, seed: int = 0) -> dict[str, Tensor]:
    """The weights of the small model after it learned the first so many digits by heart."""
    of = digits()
    inputs, labels = of.train.batch(range(count))
    return learned(inputs, labels, steps)  # type: ignore[arg-type]


def learned(inputs: Tensor, labels: Tensor, steps: int) -> dict[str, Tensor]:
    model = digits().model
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(params.values(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(torch.func.functional_call(model, params, (inputs,)), labels).backward()
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def of_model(weights: dict[str, Tensor], count: int) -> tuple[Scene, Tensor]:
    of = digits()
    scene, _ = in_question(victims=1)
    inputs, labels = zip(of.train.batch(range(count)), of.test.batch(range(OTHERS)), strict=True)
    suspects = Suspects(torch.cat(inputs), torch.cat(labels))  # type: ignore[arg-type]
    kinds = torch.tensor([[MEMBER] * count + [OTHER] * OTHERS])
    return replace(scene, updates=replace(scene.updates, before=Tree.expand(weights, 1)), suspects=suspects), kinds


def test_what_a_model_learned_by_heart_is_told_by_its_loss() -> None:
    assert auc(LossThreshold(), *of_model(trained(60, 300), 60)) > 0.8
    assert 0.4 < auc(LossThreshold(), *of_model(trained(60, 0), 60)) < 0.6  # before training


def test_confidence_is_the_loss_without_its_border() -> None:
    scene, _ = of_model(trained(60, 300), 60)
    assert scene.suspects is not None
    weights = scene.updates.before.row(0)
    found = confidences(scene.public, weights, scene.suspects)
    with torch.no_grad():
        outputs = torch.func.functional_call(scene.public.model, weights, (scene.suspects.inputs,))
    loss = F.cross_entropy(outputs.double(), scene.suspects.labels, reduction="none")
    torch.testing.assert_close(F.softplus(-found), loss)
    as_loss = confidences(replace(scene.public, classes=None), weights, scene.suspects)
    torch.testing.assert_close(-as_loss, loss, rtol=1e-4, atol=1e-5)


class Lesson:
    """Reference models as the target was trained."""

    examples = 60

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, examples: Examples, chain: Chain, number: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.seen.append(number)
        inputs, labels = examples.batch(range(len(examples)))
        return learned(inputs, labels, 150), {}  # type: ignore[arg-type]


def test_beside_reference_models_members_are_told_at_least_as_well() -> None:
    scene, kinds = of_model(trained(60, 150), 60)
    lesson, of = Lesson(), digits()
    auxiliary = of.train.subset(range(200, 400))
    lab = Lab(scene.public, scene.updates, auxiliary, Streams.seeded(0, [0]), training=lesson)
    attack = LiRA(references=6)
    scores = attack.run(scene, attack.fit(lab)).scores
    assert lesson.seen == list(range(6))
    beside = told(scores.numpy(), kinds.numpy(), resamples=10).metrics[AUC].mean
    assert beside >= auc(LossThreshold(), scene, kinds)
    assert beside > 0.85


def test_an_example_that_is_easy_for_all_is_no_member_for_that() -> None:
    own = torch.tensor([5.0, 2.0], dtype=torch.float64)
    beside = torch.tensor([[5.0, 0.0], [5.2, 0.2], [4.8, -0.2]], dtype=torch.float64)
    easy, hard = beyond(own, beside, shared=16.0)
    assert abs(easy) < 0.1 < 5 < hard
    assert float(beyond(own, beside, shared=0.0)[1]) == pytest.approx(2 / float(beside[:, 1].std(correction=0)))


def test_without_training_there_are_no_references() -> None:
    scene, _ = in_question(victims=1)
    lab = Lab(scene.public, scene.updates, digits().test, Streams.seeded(0, [0]))
    with pytest.raises(FedveilError, match="audit that trains"):
        LiRA().fit(lab)


@pytest.mark.parametrize("name", ["update-alignment", "fedmia", "loss-threshold", "lira"])
def test_they_ask_who_was_a_member_and_say_what_they_look_at(name: str) -> None:
    attack = attacks.parse(name)
    assert attack.question == "member"
    assert "suspects" in attack.needs
    assert attack.looks_at == ("model" if name in ("loss-threshold", "lira") else "updates")
    scene, _ = in_question(victims=3)
    with pytest.raises(FedveilError, match="examples in question"):
        attack.run(replace(scene, suspects=None))
