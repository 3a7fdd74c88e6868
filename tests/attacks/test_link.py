"""The link test on real updates of small models: every defense, both protocols, naive and informed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks import replay as replaying
from fedveil.attacks.link import LinkTest
from fedveil.attacks.replay import shared_updates
from fedveil.attacks.scene import Scene, Workbench
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.settings import FederationSettings
from fedveil.registry import attacks, defenses
from fedveil.streams import Streams

from .linking import DELTA, FEDSGD, WEIGHTS, digits, naive, noise_instead, scene_of

NAMES = [name for name in defenses.entries() if not name.startswith("test-")]
PROTOCOLS = {"fedsgd": FEDSGD, "weights": WEIGHTS, "delta": DELTA}


def share(scene: Scene, place: Tensor) -> float:
    return float(LinkTest().run(scene).linked(place).double().mean())


def test_it_is_registered_as_an_attack_that_links() -> None:
    attack = attacks.parse("link")
    assert isinstance(attack, LinkTest)
    assert (attack.question, attack.needs) == ("link", {"candidates"})


@pytest.mark.parametrize("settings", PROTOCOLS.values(), ids=PROTOCOLS)
@pytest.mark.parametrize("batch", [1, 3])
def test_undefended_updates_are_all_linked(settings: FederationSettings, batch: int) -> None:
    assert share(*scene_of(digits(), None, replace(settings, batch_size=2), batch=batch)) == 1


def test_noise_is_linked_by_chance_only() -> None:
    scene, place = scene_of(digits(), None, victims=60)
    assert 0 <= share(noise_instead(scene), place) <= 0.15  # chance: 0.05
    informed, place = scene_of(digits(), "gaussian-noise:sigma=1000", victims=60)
    assert 0 <= share(informed, place) <= 0.15


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", NAMES)
def test_every_defense_is_read_under_every_protocol_that_takes_it(name: str, protocol: str) -> None:
    spec = "ppfa:at=gradient" if (name, protocol) == ("ppfa", "fedsgd") else name
    try:
        Chain.of(spec).check_message(PROTOCOLS[protocol].message)
    except FedveilError:
        pytest.skip("it does not protect such a message")
    # Two local epochs: several steps behind one message.
    settings = FEDSGD if protocol == "fedsgd" else replace(PROTOCOLS[protocol], local_epochs=2)
    scene, _ = scene_of(digits(), spec, settings, victims=2, among=4, batch=2)
    for knowing in (scene, naive(scene)):
        found = LinkTest().run(knowing)
        assert found.scores.shape == (2, 4)
        assert found.scores.isfinite().all()
        assert torch.equal(found.scores, LinkTest().run(knowing).scores)
        assert not found.exact.any() or knowing is scene


@pytest.mark.parametrize(
    "spec, settings, least, exact",
    [
        ("clip:norm=0.01", FEDSGD, 1.0, True),
        ("gradient-pruning:prune=0.97", FEDSGD, 1.0, True),
        ("gradient-pruning:prune=0.97", WEIGHTS, 1.0, True),
        ("sign-compression:flip=0.3", FEDSGD, 0.9, True),
        ("gradient-dropout:keep=0.05,sigma=1", FEDSGD, 1.0, True),
        ("gradient-dropout:keep=0.05,sigma=1", WEIGHTS, 1.0, True),
        ("gradient-dropout:keep=0.05,sigma=1", DELTA, 1.0, True),
        ("gradient-masking:share=0.97", WEIGHTS, 1.0, True),
        ("spm", WEIGHTS, 0.6, True),
        ("spm", DELTA, 0.9, True),
        ("pnpm", FEDSGD, 0.9, True),
        ("pm:epsilon=12,bound=0.1", DELTA, 0.9, True),
        ("ldp-fl:adaptive=true", WEIGHTS, 0.9, True),
        ("noise-add:ratio=3", FEDSGD, 0.5, True),
        ("ppfa:direction=random", WEIGHTS, 1.0, True),
        ("dp-sgd:noise_multiplier=0.01", DELTA, 1.0, True),
        ("soteria", FEDSGD, 1.0, False),
        ("fedem", FEDSGD, 1.0, False),
        ("fedcrap:radius=1", WEIGHTS, 0.8, False),
        ("fedbarre:lr=0.5", FEDSGD, 0.9, False),
        ("cdp", FEDSGD, 1.0, False),
        # Chains: up to the last random mechanism, or by what is known where something acts behind it.
        ("clip:norm=0.1+gaussian-noise:sigma=0.002", FEDSGD, 0.8, True),
        ("fedem+gaussian-noise:sigma=0.01", FEDSGD, 0.8, False),
        ("gaussian-noise:sigma=0.01+sign-compression", FEDSGD, 0.8, False),
        ("fedbarre+gaussian-noise:sigma=0.01", FEDSGD, 0.8, False),
        ("clip:norm=0.1+spm", WEIGHTS, 0.4, True),
        ("fedem+gradient-dropout:keep=0.3", FEDSGD, 0.8, False),
    ],
)
def test_who_knows_the_defense_links(spec: str, settings: FederationSettings, least: float, exact: bool) -> None:
    scene, place = scene_of(digits(), spec, settings, victims=10)
    found = LinkTest().run(scene)
    assert float(found.linked(place).double().mean()) >= least
    assert found.exact.tolist() == [exact] * 10


@pytest.mark.parametrize(
    "spec, settings",
    [
        ("gradient-pruning:prune=0.99", FEDSGD),
        ("spm", WEIGHTS),
        ("gradient-dropout:keep=0.05,sigma=1", FEDSGD),
        ("fedbarre:lr=1", FEDSGD),
    ],
)
def test_knowing_the_defense_helps(spec: str, settings: FederationSettings) -> None:
    scene, place = scene_of(digits(), spec, settings, victims=12)
    assert share(scene, place) >= share(naive(scene), place) + 0.25


def test_of_several_histories_the_best_counts() -> None:
    """The victims made three steps first; the attacker knows that it was one, two or three."""
    scene, place = scene_of(digits(), "fedbarre:models=1,epochs=3,lr=0.5", victims=12)
    few, all_three = (
        LinkTest().run(replace(scene, chain=Chain.of(f"fedbarre:models={models},lr=0.5"))).scores for models in (1, 3)
    )
    assert (all_three >= few).all()
    own = place[:, None]
    assert (all_three.gather(1, own) > few.gather(1, own) + 1e-3).all()
    assert (all_three.gather(1, own) > 0.999).all()


def test_calibrated_noise_is_not_linked() -> None:
    assert share(*scene_of(digits(), "dp-gaussian:epsilon=1", victims=40)) <= 0.2  # chance: 0.05


def test_local_steps_are_replayed_as_they_were() -> None:
    settings = FederationSettings(
        protocol="fedavg", batch_size=2, local_epochs=3, lr=0.5, momentum=0.9, weight_decay=0.01, upload="weights"
    )
    for batch, exact in ((2, True), (5, False)):  # of three batches the order is not known
        scene, place = scene_of(digits(), "gradient-pruning:prune=0.9", settings, batch=batch, victims=4)
        found = LinkTest().run(scene)
        assert found.linked(place).all()
        assert found.exact.tolist() == [exact] * 4
        if exact:
            own = found.scores.gather(1, place[:, None])
            assert (own > -1e-6).all()  # minus the squared distance, over the square of the update


# ---- what must not matter ----------------------------------------------------------------------------------


def test_a_victim_alone_is_scored_as_in_a_stack() -> None:
    scene, _ = scene_of(digits(), "fedem+gradient-dropout", victims=3, among=6)
    whole = LinkTest().run(scene).scores
    assert torch.equal(LinkTest().run(scene.rows([2])).scores[0], whole[2])


def test_the_order_of_candidates_and_the_memory_at_hand_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, _ = scene_of(digits(), "clip:norm=0.1+gaussian-noise:sigma=0.01", victims=2, among=6)
    assert scene.candidates is not None
    whole = LinkTest().run(scene).scores
    order = [3, 0, 5, 1, 4, 2]
    pictures, labels = scene.candidates.inputs, scene.candidates.labels
    turned = replace(scene.candidates, inputs=pictures[:, order], labels=labels[:, order])  # type: ignore[index]
    found = LinkTest().run(replace(scene, candidates=turned)).scores
    torch.testing.assert_close(found, whole[:, order], rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(replaying, "MOST_BYTES", 1)
    torch.testing.assert_close(LinkTest().run(scene).scores, whole, rtol=1e-5, atol=1e-5)


def test_it_tells_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    scene, _ = scene_of(digits(), None, victims=2, among=4)
    LinkTest().run(replace(scene, bench=Workbench(report=lambda done, total: told.append((done, total)))))
    assert told == [(4, 8), (8, 8)]


def test_what_cannot_be_linked_is_refused() -> None:
    scene, _ = scene_of(digits(), None, victims=2, among=4)
    with pytest.raises(FedveilError, match="here there are none"):
        LinkTest().run(replace(scene, candidates=None))
    assert scene.candidates is not None
    twice = replace(scene.candidates, labels=scene.candidates.labels.repeat(1, 1, 2))
    with pytest.raises(FedveilError, match="a candidate has 2 examples, but an update here is of 1"):
        LinkTest().run(replace(scene, candidates=twice))


# ---- models --------------------------------------------------------------------------------------------------


class Stubborn(nn.Module):
    """A model that looks at its values as it goes, which vmap does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        return self.layer(flat if float(flat.sum()) > -1e9 else -flat)  # type: ignore[no-any-return]


class Normed(nn.Sequential):
    """A model with batch norm."""

    def __init__(self) -> None:
        convolution = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        super().__init__(*convolution, nn.Flatten(), nn.Linear(144, 10))


class Dropping(nn.Module):
    """A model with dropout as a layer, or as a function."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3) if layer else None
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Sigmoid())
        self.last = nn.Linear(24, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers(inputs)
        hidden = self.drop(hidden) if self.drop is not None else F.dropout(hidden, 0.3, self.training)
        return self.last(hidden)  # type: ignore[no-any-return]


def seeded(make: type[nn.Module], *arguments: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*arguments)


def test_any_model_is_taken_one_candidate_after_another() -> None:
    scene, place = scene_of(digits(seeded(Stubborn)), "gaussian-noise:sigma=0.01", victims=3)
    assert share(scene, place) == 1
    with pytest.raises(RuntimeError):
        LinkTest().run(replace(scene, bench=Workbench(backend="stacked")))


def test_backends_agree() -> None:
    scene, _ = scene_of(digits(), "fedem+spm", WEIGHTS, victims=2)
    one, other = (LinkTest().run(replace(scene, bench=Workbench(backend=b))).scores for b in ("stacked", "loop"))  # type: ignore[arg-type]
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1)


@pytest.mark.parametrize("layer", [True, False])
def test_dropout_is_switched_off_and_told(layer: bool) -> None:
    state = torch.get_rng_state()
    scene, place = scene_of(digits(seeded(Dropping, layer)), "clip:norm=0.1", victims=6)
    found = LinkTest().run(scene)
    assert float(found.linked(place).double().mean()) >= 0.6
    assert not found.exact.any()
    assert torch.equal(found.scores, LinkTest().run(scene).scores)
    assert torch.equal(torch.get_rng_state(), state)
    # Either form of the same model, switched off, gives the same gradients.
    other = replace(scene, public=replace(scene.public, model=seeded(Dropping, not layer)))
    torch.testing.assert_close(LinkTest().run(other).scores, found.scores, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [FEDSGD, replace(WEIGHTS, local_epochs=2)], ids=["fedsgd", "fedavg"])
def test_batch_norm_is_as_in_training(settings: FederationSettings) -> None:
    scene, place = scene_of(
        digits(seeded(Normed)), "gaussian-noise:sigma=0.0001", settings, victims=3, batch=2, among=5
    )
    assert share(scene, place) == 1


# ---- the replay itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, "clip:norm=0.05+gradient-pruning:prune=0.5", "clip:norm=0.05,at=upload"])
@pytest.mark.parametrize(
    "settings",
    [
        FEDSGD,
        FederationSettings(protocol="fedavg", batch_size=5, local_epochs=3, momentum=0.9, weight_decay=0.1, lr=0.5),
        FederationSettings(protocol="fedavg", batch_size=5, local_epochs=2, momentum=0.5, upload="delta"),
        FederationSettings(protocol="fedavg", batch_size=2, momentum=0.5, lr=0.5),
    ],
    ids=["fedsgd", "weights", "delta", "several batches"],
)
def test_a_replay_of_the_true_examples_gives_the_message(spec: str | None, settings: FederationSettings) -> None:
    scene, place = scene_of(digits(), spec, settings, victims=3, batch=5)
    assert scene.candidates is not None
    own = torch.arange(3), place
    inputs, labels = scene.candidates.inputs[own], scene.candidates.labels[own]  # type: ignore[index]
    made = shared_updates(scene.public, scene.updates.rows([0]), scene.chain, inputs, labels, scene.streams)
    torch.testing.assert_close(dict(made), dict(scene.updates.message), rtol=1e-3, atol=1e-6)
    assert float((made - scene.updates.message).norm().max()) < 1e-4 * float(scene.updates.message.norm().min())


def test_the_attacker_draws_numbers_of_its_own() -> None:
    scene, _ = scene_of(digits(), "gaussian-noise:sigma=1", victims=1)
    assert scene.candidates is not None
    inputs, labels = scene.candidates.inputs[0, :3], scene.candidates.labels[0, :3]  # type: ignore[index]
    arguments = scene.public, scene.updates, scene.chain, inputs, labels
    one = shared_updates(*arguments, Streams.seeded(1, range(3)))
    other = shared_updates(*arguments, Streams.seeded(2, range(3)))
    assert (one - other).norm().min() > 10
