"""Gradient accumulation in `Guard`: micro-batches of one step give what the whole batch gives, protected once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.defenses.base import Defense
from fedveil.defenses.noise import GaussianNoise
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.guard.guard import Guard
from fedveil.registry import defenses

ON_GRADIENTS = [
    name
    for name in defenses.entries()
    if defenses.build(name).acts_at == "gradient" and name not in ("none", "fedbarre")
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def data(size=11):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def guarded(spec, **options):
    return Guard(network(), F.cross_entropy, spec, seed=3, **{"batch_size": 11, **options})


def in_parts(guard, x, y, sizes=(4, 1, 6)):
    with guard.accumulate():
        for inputs, targets in zip(x.split(sizes), y.split(sizes), strict=True):
            guard.backward(inputs, targets)
    return gradients(guard.model)


def at_once(guard, x, y):
    guard.backward(x, y)
    return gradients(guard.model)


SPECS = [*ON_GRADIENTS, "none", "ppfa:at=gradient", "dp-sgd:clip=0.1+clip:norm=0.01"]
SIZES = [(spec, sizes) for spec in SPECS for sizes in ((11,), (4, 1, 6))]


@pytest.mark.parametrize("spec, sizes", [*SIZES, ("dp-sgd", (0, 5, 6))], ids=str)
def test_micro_batches_give_what_one_batch_gives(spec, sizes):
    x, y = data()
    expected = at_once(guarded(spec), x, y)
    torch.testing.assert_close(in_parts(guarded(spec), x, y, sizes), expected, rtol=1e-5, atol=1e-6)


def test_the_clipped_norm_is_that_of_the_step():
    x, y = data()
    found = in_parts(guarded("clip:norm=1e-3"), x, y)
    assert torch.cat([g.flatten() for g in found.values()]).norm() == pytest.approx(1e-3, rel=1e-4)


def test_noise_is_drawn_once():
    x, y = data()
    noise = in_parts(guarded("dp-sgd:clip=1e-9,noise_multiplier=1e9"), x, y)  # N(0, 1) / 11
    alone = at_once(guarded("dp-sgd:clip=1e-9,noise_multiplier=1e9"), x, y)
    torch.testing.assert_close(noise, alone)
    assert torch.cat([g.flatten() for g in noise.values()]).std() == pytest.approx(1 / 11, rel=0.35)


def test_later_steps_and_plain_steps_draw_alike():
    x, y = data()
    first, second = guarded(GaussianNoise(sigma=1.0)), guarded(GaussianNoise(sigma=1.0))
    found = []
    for _ in range(3):
        for guard, take in ((first, at_once), (second, in_parts)):
            guard.model.zero_grad()
            found.append(copy.deepcopy(take(guard, x, y)))
    for whole, parts in zip(found[::2], found[1::2], strict=True):
        torch.testing.assert_close(parts, whole)
    assert not torch.equal(found[0]["0.weight"], found[2]["0.weight"])


def test_each_backward_returns_its_loss_and_nothing_is_in_grad_before_the_end():
    x, y = data()
    guard = guarded("clip")
    with guard.accumulate():
        loss = guard.backward(x[:4], y[:4])
        torch.testing.assert_close(loss, F.cross_entropy(guard.model(x[:4]), y[:4]).detach())
        assert all(gradient is None for gradient in gradients(guard.model).values())
    assert all(gradient is not None for gradient in gradients(guard.model).values())


@pytest.mark.parametrize("spec", ["fedem:steps=3", "fedcrap:steps=3"])
def test_data_defenses_perturb_every_micro_batch(spec):
    """Each micro-batch is a batch of its own for them; one is enough to be the whole batch, to the bit but rounding."""
    x, y = data()
    whole = at_once(guarded(spec), x, y)
    torch.testing.assert_close(in_parts(guarded(spec), x, y, (11,)), whole, rtol=1e-5, atol=1e-6)
    found = in_parts(guarded(f"{spec}+clip:norm=1e-3"), x, y)
    assert torch.cat([g.flatten() for g in found.values()]).norm() == pytest.approx(1e-3, rel=1e-4)


def test_micro_batches_draw_dropout_masks_of_their_own():
    seen = []

    class Sees(nn.Module):
        def forward(self, x):
            seen.append(x.detach().clone())
            return x

    model = nn.Sequential(nn.Dropout(0.5), Sees(), nn.Linear(6, 3))
    guard = Guard(model, F.cross_entropy, "clip", seed=0)
    ones, y = torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)
    with guard.accumulate():
        guard.backward(ones, y)
        guard.backward(ones, y)
    assert not torch.equal(seen[0], seen[1])


def test_batch_norm_moves_with_every_micro_batch():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    guarded = copy.deepcopy(plain)
    x, y = data(12)
    for part in (slice(0, 4), slice(4, 12)):
        plain(x[part])
    guard = Guard(guarded, F.cross_entropy, "clip")
    with guard.accumulate():
        for part in (slice(0, 4), slice(4, 12)):
            guard.backward(x[part], y[part])
    torch.testing.assert_close(dict(guarded.named_buffers()), dict(plain.named_buffers()))


def test_named_inputs_of_different_lengths():
    """Text is padded to a length of its own in every micro-batch: that matters only where a defense reads the data."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

        def forward(self, *, ids):
            return self.head(self.embed(ids).mean(1))

    parts = [({"ids": torch.randint(0, 11, (2, length))}, torch.tensor([0, 1])) for length in (5, 7)]

    def run(spec):
        guard = Guard(Bag(), F.cross_entropy, spec, perturb="ids")
        with guard.accumulate():
            for part in parts:
                guard.backward(*part)

    run("clip:norm=1e-3")
    with pytest.raises(FedveilError, match=r"ppfa:at=gradient looks at all examples.*pad them alike"):
        run("ppfa:at=gradient")


# ---- what is refused ----------------------------------------------------------------------------------------


def test_a_defense_that_needs_the_whole_step_is_refused_by_name():
    x, y = data()
    guard = Guard(network(), F.cross_entropy, "fedbarre", validation=(x, y))
    with pytest.raises(FedveilError, match="fedbarre needs all examples of a step at once"), guard.accumulate():
        pass


@declared
class Counter(Defense):
    """Counts what it was asked for, in its memory."""

    name = "counter"

    def protect(self, update, call):
        call.state["steps"] = call.state.get("steps", torch.zeros(1)) + 1
        return update


def test_a_step_that_fails_leaves_everything_as_it_was():
    x, y = data()
    guard = Guard(network(), F.cross_entropy, Counter())

    def fail():
        with guard.accumulate():
            guard.backward(x, y)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert all(gradient is None for gradient in gradients(guard.model).values())
    in_parts(guard, x, y)
    assert guard._states[0]["steps"] == 1


def test_data_that_is_not_finite_is_refused_at_once():
    x, y = data()
    x[5] = torch.nan
    guard = guarded("clip")
    with pytest.raises(FedveilError, match="not finite"):
        in_parts(guard, x, y)
    assert all(gradient is None for gradient in gradients(guard.model).values())


def test_scopes_are_for_steps_alone():
    guard = guarded("clip")
    with pytest.raises(FedveilError, match="ended without a batch"), guard.accumulate():
        pass
    for call in (guard.new_round, guard.upload, lambda: guard.accumulate().__enter__()):
        with pytest.raises(FedveilError, match="still open"), guard.accumulate():
            call()
    with pytest.raises(FedveilError, match="protects the upload"), guarded("spm").accumulate():
        pass


# ---- accumulation without a scope ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["clip", "dp-sgd", "fedbarre:models=1"])
def test_a_second_backward_onto_a_protected_gradient_is_refused(spec):
    x, y = data()
    guard = guarded(spec)
    guard.backward(x, y)
    before = copy.deepcopy(gradients(guard.model))
    with pytest.raises(FedveilError, match=r"zero_grad\(\), or put.*'with guard.accumulate\(\):'"):
        guard.backward(x, y)
    with pytest.raises(FedveilError, match="zero_grad"), guard.accumulate():
        pass
    torch.testing.assert_close(gradients(guard.model), before, rtol=0, atol=0)
    torch.nn.utils.clip_grad_norm_(guard.model.parameters(), 1e-3)  # scaled in place it is still the old one
    torch.optim.SGD(guard.model.parameters(), lr=0.1).step()
    with pytest.raises(FedveilError, match="zero_grad"):
        guard.backward(x, y)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_gradients_are_no_accumulation(set_to_none):
    x, y = data()
    guard = guarded("clip")
    optimizer = torch.optim.SGD(guard.model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        guard.backward(x, y)
        optimizer.step()
    expected = at_once(guarded("clip"), x, y)
    torch.testing.assert_close(gradients(guard.model), expected)


def test_gradients_of_another_source_add_up_on_either_side():
    x, y = data()
    guard = guarded("clip:norm=1e-3")
    expected = {name: g + 1 for name, g in at_once(guarded("clip:norm=1e-3"), x, y).items()}
    for first in (True, False, True):
        guard.model.zero_grad()
        penalty = sum(parameter.sum() for parameter in guard.model.parameters())
        if first:
            penalty.backward()
        guard.backward(x, y)
        if not first:
            penalty.backward()
        torch.testing.assert_close(gradients(guard.model), expected)


def test_without_a_change_of_the_gradient_batches_add_up_as_in_plain_torch():
    x, y = data()
    for spec in ("none", "fedem:radius=0"):
        guard = guarded(spec)
        guard.backward(x, y)
        once = copy.deepcopy(gradients(guard.model))
        guard.backward(x, y)
        torch.testing.assert_close(gradients(guard.model), {name: 2 * g for name, g in once.items()})
