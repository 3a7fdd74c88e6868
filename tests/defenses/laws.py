"""Laws that every registered defense keeps: one function each, run for all of them in test_laws.py.

A new defense is covered as soon as it is registered. It adds an entry to `IDENTITY` if some settings of it change
nothing, and to `SETTINGS` if its default settings are not the only ones worth a check.
"""

import copy
import dataclasses
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.defenses.base import PLACES, Call, Defense, Facts, states_knowledge
from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import Exposure
from fedveil.errors import FedveilError
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree

NAMES = list(defenses.entries())
# Settings that leave the update as it is.
IDENTITY = {
    "dp-clip": ["dp-clip:clip=1e6,sigma=0", "dp-clip:clip=1e6,sigma=0,at=upload"],
    "cdp": ["cdp", "cdp:noise_multiplier=100,clip=0.1"],  # it acts on the server only
    "none": ["none"],
    "gaussian-noise": ["gaussian-noise:sigma=0", "gaussian-noise:sigma=0,at=upload"],
    "laplace-noise": ["laplace-noise:scale=0"],
    "clip": ["clip:norm=1e6", "clip:norm=1e30,order=l1", "clip:norm=3e38"],
    "gradient-dropout": ["gradient-dropout:keep=1", "gradient-dropout:keep=1,match_spread=true"],
    "gradient-masking": ["gradient-masking:share=0"],
    "gradient-pruning": ["gradient-pruning:prune=0", "gradient-pruning:prune=0,scope=model"],
    "soteria": ["soteria:prune=0"],
    "noise-add": ["noise-add:ratio=0"],
    "ldpm": ["ldpm:sigma=0,clip=1e6"],
    "ppfa": ["ppfa:epsilon=1", "ppfa:epsilon=0.8,c=0.2,at=gradient"],
    "fedem": ["fedem:radius=0", "fedem:radius=0,norm=linf,step=relative"],
    "fedcrap": ["fedcrap:radius=0", "fedcrap:radius=0,share=1,projection=masked,freeze=true"],
    "fedbarre": ["fedbarre:models=1,lr=0,high=0", "fedbarre:lr=0,high=0"],
    "spm": ["spm:epsilon=50", "spm:epsilon=50,debias=true"],
    "pnpm": ["pnpm:epsilon=50"],
}
# Settings beside the defaults that the laws are checked at.
SETTINGS = {
    "dp-clip": ["dp-clip:clip=0.01,sigma=1", "dp-clip:at=upload"],
    "dp-gaussian": ["dp-gaussian:epsilon=0.1,clip=0.1", "dp-gaussian:epsilon=100,delta=1e-9,at=upload"],
    "dp-laplace": ["dp-laplace:epsilon=0.1", "dp-laplace:epsilon=50,order=l2", "dp-laplace:at=upload"],
    "dp-sgd": ["dp-sgd:noise_multiplier=1e-3,clip=0.01", "dp-sgd:clip=100"],
    "cdp": ["cdp:noise_multiplier=3,clip=0.1"],
    "spm": ["spm:epsilon=0.001", "spm:epsilon=3.9,debias=true"],
    "pnpm": ["pnpm:epsilon=0.001", "pnpm:epsilon=50"],
    "pm": ["pm:epsilon=0.001", "pm:epsilon=15,bound=0.1", "pm:epsilon=50"],
    "duchi": ["duchi:epsilon=0.001", "duchi:epsilon=50,bound=0.1"],
    "ldp-fl": ["ldp-fl:adaptive=true", "ldp-fl:epsilon=0.001,center=-0.2", "ldp-fl:epsilon=50,adaptive=true"],
    "clip": ["clip:norm=0.01", "clip:norm=0.01,order=l1", "clip:at=upload,norm=0.1"],
    "gaussian-noise": ["gaussian-noise:sigma=0.1", "gaussian-noise:at=upload"],
    "laplace-noise": ["laplace-noise:scale=0.1", "laplace-noise:at=upload"],
    "gradient-dropout": [
        "gradient-dropout:keep=0.1,sigma=0.5",
        "gradient-dropout:match_spread=true",
        "gradient-dropout:sigma=0",
        "gradient-dropout:at=upload",
    ],
}
SETTINGS |= {
    "fedem": ["fedem:radius=2,min_radius=1,step=relative", "fedem:radius=1,norm=linf,min_radius=0.5,freeze=true"],
    "fedcrap": ["fedcrap:radius=4,share=0.4,step=relative", "fedcrap:radius=2,share=0.5,projection=masked"],
    "fedbarre": ["fedbarre:high=2,low=1,epochs=2,lam=0", "fedbarre:selection=mixed", "fedbarre:sigma=0,low=0.01"],
}
SETTINGS |= {
    "gradient-masking": ["gradient-masking:share=0.9"],
    "gradient-pruning": ["gradient-pruning:prune=0.3", "gradient-pruning:prune=0.5,scope=model"],
    "sign-compression": ["sign-compression:scale=0.01", "sign-compression:flip=0.2"],
    "soteria": ["soteria:prune=0.3", 'soteria:layer="0",prune=0.6', 'soteria:layer="0",features=3'],
    "noise-add": ["noise-add:ratio=2"],
    "ldpm": ["ldpm:sigma=0.1,clip=0.01"],
    "ppfa": ["ppfa:direction=random", "ppfa:at=gradient,epsilon=0.1", "ppfa:steps=3,lr=1,diameter=10"],
}
EVERY = [(name, spec) for name in NAMES for spec in (name, *SETTINGS.get(name, ()))]
PROTECTING = [spec for _, spec in EVERY if type(defenses.parse(spec)).protect is not Defense.protect]
SERVERS = [spec for _, spec in EVERY if defenses.parse(spec).acts_at == "server"]
EXPOSURE = Exposure(parameters=1000, rounds=10, steps_per_round=1, sampling_rate=1.0)


@cache
def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


class Scale(nn.Module):
    """A layer with a single number."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * x


def make_batch(clients=4, size=6, dtype=torch.float32, seed=0, *, scalar=False):
    """A step of some clients, with weights and data of their own; `scalar`: one parameter is a single number."""
    generator = torch.Generator().manual_seed(1)
    model = copy.deepcopy(nn.Sequential(*small_model(), Scale()) if scalar else small_model()).to(dtype)
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, clients).map(torch.clone)
    batch = ClientBatch(
        Engine(model, F.cross_entropy, backend="loop"),
        params,
        Tree({}),
        torch.randn(clients, size, 5, generator=generator).to(dtype),
        torch.randint(0, 3, (clients, size), generator=generator),
        Streams.seeded(seed, range(clients), "law"),
    )
    held_out = torch.randn(clients, 8, 5, generator=generator).to(dtype), torch.arange(8).expand(clients, 8) % 3
    own = batch.streams.fold("validation")
    batch.validation = dataclasses.replace(batch, inputs=held_out[0], targets=held_out[1], streams=own)
    return batch


def call_of(batch):
    """What `protect` gets of a batch."""
    return Call(batch.streams, batch.state, batch)


def make_call(**options):
    """What `protect` gets of a batch that `make_batch` makes."""
    return call_of(make_batch(**options))


def rows(batch, index):
    """The same step for some of its clients."""
    return dataclasses.replace(
        batch,
        params=batch.params.rows(index),
        buffers=Tree({}),
        inputs=batch.inputs[index],
        targets=batch.targets[index],
        streams=batch.streams.rows(index),
        state={},
        validation=batch.validation and rows(batch.validation, index),
    )


def apply(spec, batch):
    """All that a client does under a defense: the step, then the upload of its gradient."""
    chain = Chain.of(spec)
    states = chain.new_states()
    shared = chain.step(batch, states)
    return chain.upload(shared.update, batch, states)


def equal(left, right):
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


# ---- the laws -----------------------------------------------------------------------------------------


def identity_settings_change_nothing(spec):
    assert equal(apply(spec, make_batch()), make_batch().gradient())


def same_seed_same_result(spec):
    assert equal(apply(spec, make_batch()), apply(spec, make_batch()))


def chunks_and_order_of_clients_change_nothing(spec):
    # In double precision: the last bits of a product depend on where its factors lie in memory.
    whole = apply(spec, make_batch(dtype=torch.float64))
    for index in ([0, 1], [2, 3], [3, 1, 0], [2]):
        part = apply(spec, rows(make_batch(dtype=torch.float64), index))
        torch.testing.assert_close(dict(part), dict(whole.rows(index)), rtol=1e-9, atol=1e-12)


def keeps_type_and_shapes(spec, dtype):
    batch = make_batch(dtype=dtype)
    result = apply(spec, batch)
    assert {name: tensor.shape for name, tensor in result.items()} == {n: p.shape for n, p in batch.params.items()}
    assert all(tensor.dtype == dtype for tensor in result.values())
    assert result.isfinite().all()


def a_single_number_is_a_parameter_too(spec):
    batch = make_batch(scalar=True)
    assert batch.params["3.scale"].shape == (4,)
    found = apply(spec, batch)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: p.shape for n, p in batch.params.items()}
    assert found.isfinite().all()
    defense = defenses.parse(spec)
    check_knowledge(defense, found)
    check_measures(defense, batch.gradient())


def complex_entries_are_refused(spec):
    batch = make_batch()
    update = Tree({**batch.gradient(), "z": torch.ones(4, 2, dtype=torch.complex64)})
    chain = Chain.of(spec)
    with pytest.raises(FedveilError, match="the parameter 'z' is of type complex64"):
        chain.upload(update, batch, chain.new_states())
    with pytest.raises(FedveilError, match="the parameter 'z' is of type complex64"):
        chain.check_parameters(update.row(0))


def says_what_an_informed_attacker_does(spec):
    defense = defenses.parse(spec)
    assert states_knowledge(defense)
    assert Chain((defense,)).without_knowledge == ()


def input_is_not_modified(spec):
    batch = make_batch()
    update = batch.gradient()
    before = copy.deepcopy((dict(update), dict(batch.params), batch.inputs, batch.targets))
    inputs = batch.inputs
    apply(spec, batch)
    defenses.parse(spec).protect(update, call_of(batch))
    assert batch.inputs is inputs  # a data defense hands on inputs of its own
    torch.testing.assert_close((dict(update), dict(batch.params), batch.inputs, batch.targets), before, rtol=0, atol=0)


def bad_numbers_are_not_hidden(spec, value):
    """The server refuses updates that are not finite: a defense must not turn a broken gradient into a plausible one,
    not even where one entry of one client is broken, and must not spread it to other clients."""
    batch = make_batch()
    update = batch.gradient()
    for entry in range(12):
        broken = update.map(torch.clone)
        broken["0.weight"][1].view(-1)[entry] = value
        finite = defenses.parse(spec).protect(broken, call_of(batch)).isfinite()
        assert finite.tolist() == [True, False, True, True]


def bad_inputs_are_not_hidden(spec, value):
    """The same for data that is not finite: what a client makes of it is refused, and no other client feels it."""
    for example in range(2):
        batch = make_batch()
        batch.inputs[1, example, 2] = value
        found = apply(spec, batch)
        assert found.isfinite().tolist() == [True, False, True, True]
        assert equal(found.rows([0, 2, 3]), apply(spec, make_batch()).rows([0, 2, 3]))


def an_update_alone_is_enough(spec):
    """A deployment may have nothing but the update: the same result, or one line that names who needs more."""
    defense = defenses.parse(spec)
    update = make_batch().gradient()
    alone = Call(make_batch().streams)
    if "batch" in defense.needs and not equal(defense.protect(update, make_call()), update):
        with pytest.raises(FedveilError, match=f"{defense.name} looks at the client's batch") as caught:
            defense.protect(update, alone)
        assert "\n" not in str(caught.value)
    elif "batch" not in defense.needs:
        assert equal(defense.protect(update, alone), defense.protect(update, make_call()))


def a_trusted_server_bounds_every_client_and_adds_noise_to_the_sum(spec):
    """In closed form, whatever the weights: the mean of clipped updates plus N(0, (noise_multiplier·clip/m)²)."""
    chain = Chain.of(f"clip:norm=100+{spec}")
    (defense,) = (each for each in chain.defenses if each.acts_at == "server")
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([0.01, 1.0, 30.0])  # below the bound, and far above
    updates = Tree({"w": torch.randn(3, 40_000, generator=generator) / 200 * sizes[:, None]})
    weights = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
    given = updates.map(torch.clone)
    found = chain.aggregate(updates, weights, Streams.seeded(0, range(3), "server")).mean(weights)["w"]
    assert equal(updates, given)
    bounded = updates["w"] * (defense.clip / updates["w"].norm(dim=1, keepdim=True)).clamp_max(1)
    noise = (found - bounded.mean(0)) / (defense.noise_multiplier * defense.clip / 3)
    # Of 40,000 standard normal numbers: the mean and the standard deviation to 5 of their standard errors.
    assert abs(float(noise.mean())) < 5 / 200
    assert abs(float(noise.std()) - 1) < 5 / 283


def zero_updates_stay_finite(spec):
    batch = make_batch()
    zero = batch.gradient() * 0.0
    defense = defenses.parse(spec)
    assert defense.protect(zero, call_of(batch)).isfinite().all()
    check_knowledge(defense, zero)
    check_measures(defense, zero)


def knowledge_has_the_shapes_of_the_update(spec):
    batch = make_batch()
    defense = defenses.parse(spec)
    check_knowledge(defense, apply(spec, batch))


def sent_out(observed):
    """Some weights of the updates' shapes, as a server may have sent them."""
    return observed.map(lambda t: torch.linspace(-1, 1, t.numel(), dtype=t.dtype).reshape(t.shape))


def check_knowledge(defense, observed):
    for facts in (
        Facts(),
        Facts(kind="weights"),
        Facts(kind="weights", before=sent_out(observed)),
        Facts(kind="delta"),
    ):
        known = defense.knowledge(observed, facts)
        for tree in (known.target, known.weight):
            assert {n: t.shape for n, t in tree.items()} == {n: t.shape for n, t in observed.items()}
            assert tree.isfinite().all()
            assert all(tree[name].dtype == observed[name].dtype for name in observed)
        assert all(weight.min() >= 0 and weight.max() <= 1 for weight in known.weight.values())


def knowledge_treats_clients_apart(spec):
    observed = apply(spec, make_batch())
    defense = defenses.parse(spec)
    before = sent_out(observed)
    for kind in ("gradient", "weights"):
        whole = defense.knowledge(observed, Facts(kind=kind, before=before))
        alone = defense.knowledge(observed.rows([2]), Facts(kind=kind, before=before.rows([2])))
        for name in observed:
            torch.testing.assert_close(alone.target[name], whole.target[name][2:3])
            torch.testing.assert_close(alone.weight[name], whole.weight[name][2:3])


def check_measures(defense, update):
    for name, value in defense.measures(update).items():
        assert isinstance(name, str)
        assert type(value) is float
        assert value == value  # not NaN


def measures_are_plain_numbers(spec):
    check_measures(defenses.parse(spec), make_batch().gradient())


def spelling_reads_back(spec):
    defense = defenses.parse(spec)
    assert defenses.parse(defenses.spell(defense)) == defense
    assert defenses.build(**defenses.describe(defense)) == defense
    chain = Chain.of(f"{defenses.spell(defense)}+none")
    assert Chain.of(str(chain)) == chain


def says_what_it_is(spec):
    defense = defenses.parse(spec)
    assert defense.name == spec.partition(":")[0]
    assert defense.acts_at in PLACES
    assert (type(defense).__doc__ or "").strip()
    promise = defense.guarantee(EXPOSURE)
    assert promise.sentence.startswith("Formal guarantee:")
    assert promise.formal == (promise.mechanism is not None)
    assert promise.formal == (defense.promises != "nothing formal")


def has_a_strength_axis(spec):
    defense = defenses.parse(spec)
    if defense.strength is not None:
        assert defense.strength.field in {field.name for field in dataclasses.fields(defense)}
        assert isinstance(getattr(defense, defense.strength.field), float | int)
    else:
        assert defense.name == "none"
