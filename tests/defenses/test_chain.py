"""Chains: defenses in the order of their places, each with its own streams and memory."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedveil as fv
from fedveil.defenses.base import Defense, Facts
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.defenses.clip import Clip
from fedveil.defenses.fedem import FedEM
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.defenses.noise import GaussianNoise, LaplaceNoise
from fedveil.defenses.none import NoDefense
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.guard.guard import Guard
from fedveil.registry import defenses
from fedveil.streams import Streams

from .laws import call_of, equal, make_batch, make_call


@declared
class Shift(Defense):
    """A toy data defense: shift the inputs and add a little noise."""

    name = "shift"
    place = "data"
    by: float = 1.0

    def perturb(self, batch):
        return batch.with_perturbed(batch.perturbed + self.by + 0.1 * batch.streams.normal_like(batch.perturbed))


@declared
class Double(Defense):
    """A toy data defense: double the inputs."""

    name = "double"
    place = "data"

    def perturb(self, batch):
        return batch.with_perturbed(batch.perturbed * 2)


@declared
class Owner(Defense):
    """A toy that owns the whole step: the gradient at negated inputs."""

    name = "owner"
    place = "data"

    def perturb(self, batch):
        raise AssertionError("the owner of a step perturbs within it")

    def gradient(self, batch):
        return batch.share(batch.with_perturbed(-batch.perturbed))


@declared
class OtherOwner(Owner):
    name = "other-owner"


@declared
class Counter(Defense):
    """A toy with memory: scales by how often each client was here."""

    name = "counter"

    def protect(self, update, call):
        visits = call.state.get("visits", torch.zeros(update.count)) + 1
        call.state["visits"] = visits
        return update * visits


@declared
class Feedback(Counter):
    name = "feedback"
    place = "upload"


@declared
class OnServer(Defense):
    name = "on-server"
    place = "server"

    def aggregate(self, updates, weights, streams):
        return updates * 2.0


@declared
class Picky(Defense):
    name = "picky"
    place = "sample"

    def sample(self, labels, size, streams):
        return torch.arange(size)


# ---- building ---------------------------------------------------------------------------------------------


def test_order_is_by_place_then_as_given():
    given = [OnServer(), Clip(at="upload"), GaussianNoise(), Shift(), Picky(), Clip(), Double()]
    names = [(d.name, d.acts_at) for d in Chain.of(given).defenses]
    assert names == [
        ("picky", "sample"),
        ("shift", "data"),
        ("double", "data"),
        ("gaussian-noise", "gradient"),
        ("clip", "gradient"),
        ("clip", "upload"),
        ("on-server", "server"),
    ]


def test_two_owners_of_the_step_are_refused_by_name():
    with pytest.raises(FedveilError, match="owner and other-owner each own the whole step"):
        Chain.of([Owner(), Clip(), OtherOwner()])


def test_from_whatever_names_one():
    chain = Chain((Clip(norm=1.0), GaussianNoise(sigma=0.1)))
    assert Chain.of(chain) is chain
    assert Chain.of("clip:norm=1+gaussian-noise:sigma=0.1") == chain
    assert Chain.of("clip:norm=1 + gaussian-noise:sigma=0.1") == chain
    assert Chain.of([Clip(norm=1.0), GaussianNoise(sigma=0.1)]) == chain
    assert Chain.of(Clip()).defenses == (Clip(),)
    assert Chain.of(None) == Chain.of(()) == Chain()
    assert Chain.of("none").defenses == Chain((NoDefense(),)).defenses == ()
    assert Chain.of("none+clip+none") == Chain.of("clip")


@pytest.mark.parametrize(
    "chain",
    [
        Chain.of("clip:norm=0.5+gaussian-noise:sigma=0.1"),
        Chain.of([Clip(norm=1e6), GaussianNoise(sigma=1e20)]),  # spelled with a plus sign of their own
        Chain.of([Clip(norm=1e-7, order="l1"), LaplaceNoise(scale=2e-6, at="upload")]),
        Chain.of("none"),
    ],
    ids=str,
)
def test_spelling_reads_back(chain):
    assert Chain.of(str(chain)) == chain


@pytest.mark.parametrize("spec", ["clip+nosuch", "clip+", "+", "", "clip:norm=1+06"])
def test_bad_specs_are_refused_in_one_line(spec):
    with pytest.raises(FedveilError) as caught:
        Chain.of(spec)
    assert "\n" not in str(caught.value)


def test_an_empty_chain_is_no_defense():
    batch = make_batch()
    shared = Chain().step(batch, [])
    assert equal(shared.update, make_batch().gradient())
    assert str(Chain()) == "none"


def test_messages_that_a_defense_cannot_protect_are_refused_by_name():
    @declared
    class OfWeights(Defense):
        name = "of-weights"
        place = "upload"
        of = ("weights", "delta")

    chain = Chain((Clip(), OfWeights()))
    chain.check_message("weights")
    with pytest.raises(FedveilError, match=r"of-weights protects weights or a change of weights, .* meet a gradient"):
        chain.check_message("gradient")


# ---- running ----------------------------------------------------------------------------------------------


def test_a_data_and_a_gradient_defense_equal_composing_by_hand():
    chain = Chain.of([GaussianNoise(sigma=0.1), Shift(by=0.5)])
    shared = chain.step(make_batch(), chain.new_states())

    batch = make_batch()
    streams = [make_batch().streams.fold("place", place) for place in (0, 1)]
    inputs = batch.inputs + 0.5 + 0.1 * streams[0].normal_like(batch.inputs)
    update = batch.gradient(inputs)
    expected = update.unflat(torch.add(update.flat(), streams[1].normal(update.size), alpha=0.1))
    assert equal(shared.update, expected)
    assert torch.equal(shared.seen, inputs)  # the inputs that the gradient was taken at


def test_data_defenses_hand_their_inputs_to_the_next_and_to_the_owner():
    chain = Chain.of([Double(), Shift(by=1.0), Owner()])
    batch = make_batch()
    before = batch.inputs.clone()
    shared = chain.step(batch, chain.new_states())
    noise = 0.1 * make_batch().streams.fold("place", 1).normal_like(before)
    assert torch.equal(shared.seen, -(before * 2 + 1.0 + noise))
    assert equal(shared.update, make_batch().gradient(shared.seen))
    assert torch.equal(batch.inputs, before)  # the batch given is left as it was


def test_gradient_defenses_get_the_owners_update():
    chain = Chain.of([Clip(norm=1e-3), Owner()])
    shared = chain.step(make_batch(), chain.new_states())
    expected = make_batch().gradient(-make_batch().inputs)
    assert equal(shared.update, Clip(norm=1e-3).protect(expected, make_call()))


def test_order_matters_and_is_kept():
    clip_last = Chain.of("gaussian-noise:sigma=1+clip:norm=0.1")
    clip_first = Chain.of("clip:norm=0.1+gaussian-noise:sigma=1")
    assert (clip_last.step(make_batch(), [{}, {}]).update.norm() < 0.1001).all()
    assert (clip_first.step(make_batch(), [{}, {}]).update.norm() > 1).all()


def test_upload_defenses_act_at_the_upload_only():
    chain = Chain.of([Clip(norm=1e-3, at="upload"), GradientDropout(at="upload"), Shift(by=0.0)])
    states = chain.new_states()
    batch = make_batch()
    shared = chain.step(batch, states)
    assert equal(shared.update, make_batch().gradient(shared.seen))
    uploaded = chain.upload(shared.update, batch, states)
    assert not equal(uploaded, shared.update)
    gradient_only = Chain.of(Clip(norm=1e-3))
    assert equal(gradient_only.upload(shared.update, batch, [{}]), shared.update)


def test_every_position_draws_its_own_noise():
    chain = Chain.of([GaussianNoise(sigma=1.0), GaussianNoise(sigma=1.0)])
    zero = make_batch().gradient() * 0.0
    first, second = (defense.protect(zero, call_of(make_batch().at(k, {}))) for k, defense in enumerate(chain.defenses))
    assert not torch.equal(first["0.weight"], second["0.weight"])
    truth = make_batch().gradient()
    both = chain.step(make_batch(), chain.new_states()).update - truth
    torch.testing.assert_close(dict(both), dict(first + second), rtol=1e-4, atol=1e-5)


def test_a_position_draws_the_same_whatever_stands_behind_it():
    alone, longer = Chain.of([GaussianNoise()]), Chain.of([GaussianNoise(), Clip(norm=1e6)])
    assert equal(alone.step(make_batch(), [{}]).update, longer.step(make_batch(), [{}, {}]).update)


# ---- a message alone --------------------------------------------------------------------------------------


def test_only_who_declares_it_gets_the_data():
    given = {}

    @declared
    class Nosy(Defense):
        name = "nosy"

        def protect(self, update, call):
            given[self.name] = call.batch
            return update

    class Declared(Nosy):
        name = "declared"
        needs = frozenset({"batch"})

    chain = Chain((Nosy(), Declared()))
    batch = make_batch()
    chain.step(batch, chain.new_states())
    assert given["nosy"] is None
    assert torch.equal(given["declared"].inputs, batch.inputs)
    assert [defense.reads_data for defense in chain.defenses] == [False, True]


@pytest.mark.parametrize("kind", ["gradient", "delta"])
def test_a_message_alone_is_protected_as_with_its_data(kind):
    places = {"gradient": ("gradient", "upload"), "delta": ("upload", "upload")}[kind]
    chain = Chain((Clip(norm=0.1, at=places[0]), GaussianNoise(sigma=0.1, at=places[1]), Feedback()))
    alone, whole = chain.new_states(), chain.new_states()
    for step in range(2):
        streams = Streams.seeded(0, range(4), "step", step)
        batch = dataclasses.replace(make_batch(), streams=streams)
        update = batch.gradient()
        found = chain.protect_message(update, kind, streams, alone)
        sent = chain.step(batch, whole).update if kind == "gradient" else update
        assert equal(found, chain.upload(sent, batch, whole))
        assert torch.equal(alone[2]["visits"], torch.full((4,), step + 1.0))


@pytest.mark.parametrize(
    "spec, kind, said",
    [
        ("fedem", "gradient", "fedem acts on a client's data, and here is only a gradient to be sent"),
        ("clip+dp-sgd", "gradient", "dp-sgd acts on the gradient of every step"),
        ("clip+spm", "delta", "clip acts on the gradient of every step, and here is only a change of weights"),
        ("cdp", "gradient", "cdp acts on the server"),
        ("soteria", "gradient", "soteria looks at the client's batch, and here is only an update"),
        ("ppfa", "weights", "ppfa looks at the client's batch, .*: choose direction='random'"),
        ("pm", "gradient", "pm protects weights or a change of weights"),
    ],
)
def test_a_message_alone_is_refused_where_more_is_needed(spec, kind, said):
    chain = Chain.of(spec)
    with pytest.raises(FedveilError, match=said):
        chain.protect_message(make_batch().gradient(), kind, Streams.seeded(0, range(4)), chain.new_states())


def test_sampling_and_aggregation():
    chain = Chain.of([Picky(), OnServer()])
    streams = Streams.seeded(0, [0])
    assert chain.sample(torch.zeros(9), 3, streams).tolist() == [0, 1, 2]
    assert chain.aggregates
    update = make_batch().gradient()
    assert equal(chain.aggregate(update, torch.ones(4), streams), update * 2.0)
    assert Chain.of("clip").sample(torch.zeros(9), 3, streams) is None
    assert chain.composes
    assert not Chain.of("clip").composes
    assert not Chain.of("clip").aggregates


@declared
class PickyNoise(GaussianNoise):
    """Acts on the gradient and chooses the batch too."""

    name = "picky-noise"

    def sample(self, labels, size, streams):
        return (streams.uniform(len(labels))[0] < 0.5).nonzero().flatten()


@declared
class RandomSizes(PickyNoise):
    name = "random-sizes"
    random_sizes = True


def test_a_defense_chooses_the_batch_whatever_its_place():
    streams = Streams.seeded(0, [0])
    fixed, free = Chain((Clip(), PickyNoise())), Chain((Clip(), RandomSizes()))
    expected = PickyNoise().sample(torch.zeros(99), 50, streams.fold("place", 1, "sample"))
    for chain in (fixed, free):
        assert torch.equal(chain.sample(torch.zeros(99), 50, streams), expected)
    assert fixed.sample(torch.zeros(99), 50, streams, fixed_size=True) is not None
    assert free.sample(torch.zeros(99), 50, streams, fixed_size=True) is None
    assert (fixed.composes, fixed.random_sizes, free.composes, free.random_sizes) == (True, False, False, True)


def test_the_choice_of_a_batch_shares_no_random_numbers_with_the_noise():
    seen = []

    @declared
    class Nosy(Defense):
        def sample(self, labels, size, streams):
            seen.append(streams.uniform(8))

        def protect(self, update, call):
            seen.append(call.streams.rows([0]).uniform(8))
            return update

    chain, batch = Chain((Nosy(),)), make_batch(clients=1)
    chain.sample(torch.zeros(9), 3, batch.streams)
    chain.step(batch, [{}])
    assert not torch.equal(*seen)


# ---- memory -----------------------------------------------------------------------------------------------


def step_of(clients, chain, memory):
    batch = make_batch(clients=len(clients))
    truth = batch.gradient()
    states = memory.gather(clients, chain)
    update = chain.step(make_batch(clients=len(clients)), states).update
    memory.scatter(clients, states)
    return (update.norm() / truth.norm()).round().int().tolist()


def test_memory_keeps_clients_apart_in_whatever_groups_they_come():
    chain, memory = Chain.of([Clip(norm=1e6), Counter()]), ClientStates()
    assert step_of([3, 1, 7], chain, memory) == [1, 1, 1]
    assert step_of([1], chain, memory) == [2]
    assert step_of([7, 1], chain, memory) == [2, 3]
    assert step_of([1, 3, 7], chain, memory) == [4, 2, 3]
    assert step_of([5], chain, memory) == [1]  # a newcomer


def test_memory_of_different_layouts_is_not_mixed_up():
    chain, memory = Chain.of([Counter()]), ClientStates()
    step_of([0, 1], chain, memory)
    assert memory.layout(0) == memory.layout(1) != memory.layout(2)
    for mixed in ([2, 0], [0, 2]):  # a newcomer among others: neither may lose its memory in silence
        with pytest.raises(FedveilError, match="layout"):
            memory.gather(mixed, chain)


def test_positions_have_memory_of_their_own():
    chain = Chain.of([Counter(), Counter()])
    states = chain.new_states()
    for _ in range(2):
        chain.step(make_batch(), states)
    assert [state["visits"].tolist() for state in states] == [[2.0] * 4] * 2
    assert states[0] is not states[1]


def test_memory_of_a_round_is_forgotten_and_that_of_a_run_kept():
    class Lasting(Counter):
        state_scope = "run"

    chain, memory = Chain((Counter(), Lasting())), ClientStates()
    step_of([0, 1], chain, memory)
    memory.new_round(chain)
    states = memory.gather([0, 1], chain)
    assert states[0] == {}
    assert states[1]["visits"].tolist() == [1.0, 1.0]


# ---- what is known -----------------------------------------------------------------------------


def test_knowledge_is_undone_from_the_end():
    dropout, noise = GradientDropout(keep=0.5, sigma=0.1), GaussianNoise(sigma=0.05)
    observed = Chain.of([dropout, noise]).step(make_batch(), [{}, {}]).update
    known = Chain.of([dropout, noise]).knowledge(observed, Facts())
    last = noise.knowledge(observed, Facts())
    first = dropout.knowledge(last.target, Facts())
    assert equal(known.target, first.target)
    assert equal(known.weight, first.weight.combine(last.weight, torch.mul))
    assert known.reweight == dropout.reweight
    assert known.reach == 0


def test_knowledge_of_no_defense_is_what_was_seen():
    observed = make_batch().gradient()
    for chain in (Chain(), Chain.of("none"), Chain.of("none+clip")):
        known = chain.knowledge(observed, Facts())
        assert equal(known.target, observed)
        assert all((weight == 1).all() for weight in known.weight.values())


def test_data_defenses_move_inputs_in_their_order_and_their_reaches_add_up():
    chain, batch = Chain.of([Double(), GaussianNoise(), Shift(by=30.0)]), make_batch()
    assert (chain.moved(batch) - (2 * batch.inputs + 30)).abs().amax() < 1  # the shift draws a little noise
    both = Chain.of([FedEM(radius=0.3), FedEM(radius=0.2)]).knowledge(batch.gradient(), Facts())
    assert both.reach == pytest.approx(0.5)


# ---- what cannot be protected, and classes that are no declared defenses -----------------------------------------


class Waves(nn.Module):
    """A layer with complex weights."""

    def __init__(self):
        super().__init__()
        self.waves = nn.Parameter(torch.ones(64, 3, dtype=torch.complex64))

    def forward(self, x):
        return (x.flatten(1).to(torch.complex64) @ self.waves).abs()


@pytest.mark.parametrize("defense", [None, "gaussian-noise", "gradient-masking", "dp-sgd"])
def test_complex_parameters_are_refused_in_guard_and_federation(defense):
    words = "the parameter 'waves' is of type complex64, which no defense can protect"
    with pytest.raises(FedveilError, match=words):
        Guard(Waves(), F.cross_entropy, defense)
    data = tuple((torch.rand(12, 1, 8, 8), torch.arange(12) % 3) for _ in range(3))
    with pytest.raises(FedveilError, match="the model's weights waves are complex"):
        fv.Task(Waves(), data, clients=2)
    model = Waves()
    model.waves.requires_grad_(False)
    model.bias = nn.Parameter(torch.zeros(3))
    task = fv.Task(model, data, loss=lambda output, labels: F.cross_entropy(output + model.bias, labels), clients=2)
    model.waves.requires_grad_()  # after the task was checked
    for protocol in ("fedsgd", "fedavg"):
        with pytest.raises(FedveilError, match=words):
            fv.federate(task, defense, fv.FederationSettings(rounds=1, protocol=protocol), backend="loop")


def test_a_frozen_complex_parameter_is_not_in_the_way():
    model = nn.Sequential(Waves(), nn.Linear(3, 3))
    model[0].waves.requires_grad_(False)
    guard = Guard(model, F.cross_entropy, "gaussian-noise")
    guard.backward(torch.rand(2, 64), torch.tensor([0, 1]))
    assert model[1].weight.grad.isfinite().all()


def test_a_class_that_is_not_declared_is_refused_in_one_line():
    class Bare(Defense):
        level: float = 1.0

    class Half(GaussianNoise):
        level: float = 1.0

    class Heir(GaussianNoise):
        """Adds no field of its own, so it needs no declaration."""

    for cls in (Bare, Half):
        for make in (Chain.of, lambda defense: Chain((defense,)), lambda defense: Chain.of([Clip(), defense])):
            with pytest.raises(FedveilError, match=f"the class {cls.__name__} is not declared: put @declared"):
                make(cls())
    with pytest.raises(FedveilError, match="the class Bare is not declared"):
        defenses.spell(Bare())
    assert str(Chain.of(Heir(sigma=0.5))) == "gaussian-noise:sigma=0.5"


@pytest.mark.parametrize("wrong, words", [(GaussianNoise, r"write GaussianNoise\(\)"), (5, "5 is not a defense")])
def test_what_is_no_defense_is_refused_in_one_line(wrong, words):
    with pytest.raises(FedveilError, match=words):
        Chain.of(wrong)
    with pytest.raises(FedveilError, match=words):
        Chain.of([Clip(), wrong])


@pytest.mark.parametrize("spec", ["fedbarre:models=1000000", "fedem:steps=1000000000", "ppfa:steps=100000"])
def test_counts_that_no_run_would_survive_are_refused(spec):
    with pytest.raises(FedveilError, match="must be less than or equal to 1"):
        Chain.of(spec)


@pytest.mark.parametrize("spec", ["fedem", "fedcrap", "fedbarre:models=1"])
def test_tokens_cannot_be_perturbed(spec):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 3))
    guard = Guard(model, F.cross_entropy, spec)
    with pytest.raises(FedveilError, match=f"{spec.partition(':')[0]} perturbs real numbers.*int64.*perturb="):
        guard.backward(torch.randint(0, 10, (2, 3)), torch.tensor([0, 1]))
