"""`Guard`: one line in anyone's training loop in place of `loss.backward()`."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.defenses.clip import Clip
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.defenses.guard import Guard
from fedveil.defenses.noise import GaussianNoise
from fedveil.errors import FedveilError
from fedveil.fields import declared


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(27, 3)
    )


def data(seed=0, size=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


# ---- no defense is plain backward -------------------------------------------------------------------------


@pytest.mark.parametrize("defense", [None, "none", [], GradientDropout(keep=1.0)], ids=str)
def test_no_defense_equals_plain_backward_to_the_bit(defense):
    plain, guarded = network(), network()
    guard = Guard(guarded, F.cross_entropy, defense)
    for step in range(3):  # gradients add up over batches, buffers move
        x, y = data(step)
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        returned = guard.backward(x, y)
        assert_same(returned, loss.detach())
        assert not returned.requires_grad
        assert_same(gradients(guarded), gradients(plain))
        assert_same(guarded.state_dict(), plain.state_dict())
    assert guarded[1].num_batches_tracked == 3


def test_training_with_it_equals_plain_training():
    plain, guarded = network(), network()
    guard = Guard(guarded, F.cross_entropy, None)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (plain, guarded)]
    for step in range(4):
        x, y = data(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        guard.backward(x, y)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(guarded.state_dict(), plain.state_dict())


def modes(model, part, training):
    model.train(not training)
    model[part].train(training)
    return model


@pytest.mark.parametrize(
    "prepare",
    [
        lambda m: m.eval(),
        lambda m: modes(m, 1, training=False),  # batch norm fixed while the rest trains, as in fine-tuning
        lambda m: modes(m, 1, training=True),
    ],
    ids=["eval", "batch norm in eval", "batch norm in training"],
)
def test_every_layer_keeps_its_mode(prepare):
    plain, guarded = prepare(network()), network()
    guard = Guard(guarded, F.cross_entropy, None)
    prepare(guarded)  # after the guard was made
    x, y = data()
    F.cross_entropy(plain(x), y).backward()
    guard.backward(x, y)
    assert_same(gradients(guarded), gradients(plain))
    assert_same(guarded.state_dict(), plain.state_dict())
    assert [m.training for m in guarded.modules()] == [m.training for m in plain.modules()]


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(11, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 11)
        self.head.weight = self.embed.weight  # tied

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0][:, -1])


def test_an_lstm_with_tied_weights():
    torch.manual_seed(0)
    plain = Lstm()
    guarded = copy.deepcopy(plain)
    ids, y = torch.randint(0, 11, (4, 7)), torch.randint(0, 11, (4,))
    F.cross_entropy(plain(ids), y).backward()
    Guard(guarded, F.cross_entropy, None).backward(ids, y)
    assert guarded.head.weight is guarded.embed.weight
    assert_same(gradients(guarded), gradients(plain))


def test_named_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, *, a, b):
            return self.layer(a + b)

    torch.manual_seed(0)
    plain = Sum()
    guarded = copy.deepcopy(plain)
    inputs, y = {"a": torch.randn(5, 4), "b": torch.randn(5, 4)}, torch.randint(0, 3, (5,))
    F.cross_entropy(plain(**inputs), y).backward()
    Guard(guarded, F.cross_entropy, "clip:norm=1e6", perturb="a").backward(inputs, y)
    assert_same(gradients(guarded), gradients(plain))


def test_frozen_layers_have_no_gradient_and_are_used_as_they_are_now():
    guarded = network()
    guarded[0].requires_grad_(False)
    guard = Guard(guarded, F.cross_entropy, None)
    with torch.no_grad():
        guarded[0].weight.add_(1.0)  # weights that arrive after the guard was made
    plain = copy.deepcopy(guarded)
    x, y = data()
    F.cross_entropy(plain(x), y).backward()
    guard.backward(x, y)
    assert guarded[0].weight.grad is None
    assert_same(gradients(guarded), gradients(plain))
    guarded[0].requires_grad_(True)  # and thawed later on
    plain[0].requires_grad_(True)
    F.cross_entropy(plain(x), y).backward()
    guard.backward(x, y)
    assert_same(gradients(guarded), gradients(plain))


def test_inputs_are_left_alone():
    x, y = data()
    before = x.clone(), y.clone()
    Guard(network(), F.cross_entropy, GaussianNoise()).backward(x, y)
    assert_same((x, y), before)
    assert x.grad is None


# ---- protecting -------------------------------------------------------------------------------------------


def test_the_gradient_is_protected():
    plain, guarded = network(), network()
    x, y = data()
    F.cross_entropy(plain(x), y).backward()
    Guard(guarded, F.cross_entropy, GradientDropout(keep=0.5, sigma=0.0), seed=0).backward(x, y)
    for name, gradient in gradients(guarded).items():
        truth = gradients(plain)[name]
        assert torch.isin(gradient, torch.cat([truth.flatten() * 2, torch.zeros(1)])).all()
    shared = torch.cat([g.flatten() for g in gradients(guarded).values()])
    assert 0.3 < (shared == 0).float().mean() < 0.7


def test_a_chain_by_its_spelling():
    guarded = network()
    Guard(guarded, F.cross_entropy, "clip:norm=0.01+gaussian-noise:sigma=0").backward(*data())
    total = torch.cat([g.flatten() for g in gradients(guarded).values()]).norm()
    torch.testing.assert_close(total, torch.tensor(0.01))


def run(seed, steps=2):
    model = network()
    guard = Guard(model, F.cross_entropy, GaussianNoise(sigma=1.0), seed=seed)
    found = []
    for _ in range(steps):
        model.zero_grad()
        guard.backward(*data())
        found.append(model[4].weight.grad.clone())
    return found


def test_guards_without_a_seed_differ_every_time():
    first, second = run(None), run(None)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])


def test_guards_with_a_seed_repeat_but_not_themselves():
    first, second = run(7), run(7)
    assert_same(first, second)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], run(8)[0])


def test_the_global_generator_plays_no_part():
    before = torch.get_rng_state()
    model = network()
    torch.set_rng_state(before)
    guard = Guard(nn.Sequential(model, nn.Dropout(0.5)), F.cross_entropy, GaussianNoise(), seed=3)
    guard.backward(*data())
    assert torch.equal(torch.get_rng_state(), before)


# ---- the upload -------------------------------------------------------------------------------------------


def train(model, guard):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.backward(*data())
    optimizer.step()


def test_upload_of_weights_and_of_their_change():
    model = network()
    guard = Guard(model, F.cross_entropy, None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, guard)
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_same(guard.upload(), after)
    assert_same(guard.upload(of="delta"), {name: after[name] - before[name] for name in after})
    guard.new_round()
    assert not any(tensor.any() for tensor in guard.upload(of="delta").values())
    with pytest.raises(FedveilError, match="'weights' or 'delta', not 'gradient'"):
        guard.upload(of="gradient")


def test_upload_is_protected_and_the_model_is_not_touched():
    model = network()
    guard = Guard(model, F.cross_entropy, Clip(norm=1e-3, at="upload"))
    with torch.no_grad():
        model[4].weight.add_(1.0)
    before = copy.deepcopy(model.state_dict())
    sent = guard.upload(of="delta")
    assert torch.cat([t.flatten() for t in sent.values()]).norm() == pytest.approx(1e-3, rel=1e-5)
    sent["4.weight"].add_(5.0)
    guard.upload()["4.weight"].add_(5.0)
    assert_same(model.state_dict(), before)


def test_an_upload_defense_is_refused_by_backward_by_name():
    model = network()
    guard = Guard(model, F.cross_entropy, GaussianNoise(at="upload"))
    with pytest.raises(FedveilError, match=r"gaussian-noise:at=upload protects the upload.*upload\(\)"):
        guard.backward(*data())
    assert model[4].weight.grad is None
    assert guard.upload()["4.weight"].shape == model[4].weight.shape  # without any step before


def test_a_chain_for_both_acts_in_both():
    model, plain = network(), network()
    guard = Guard(model, F.cross_entropy, [Clip(norm=1e-3), GaussianNoise(sigma=1.0, at="upload")], seed=0)
    guard.backward(*data())
    total = torch.cat([g.flatten() for g in gradients(model).values()]).norm()
    assert total == pytest.approx(1e-3, rel=1e-4)
    noise = guard.upload()["4.weight"] - plain[4].weight
    assert 0.7 < noise.std() < 1.3


# ---- what is refused --------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_is_refused_and_nothing_moves():
    model = network()
    guard = Guard(model, F.cross_entropy, GradientDropout(keep=0.5), seed=0)
    before = copy.deepcopy(model.state_dict())
    x, y = data()
    x[0, 0, 0, 0] = math.nan
    with pytest.raises(FedveilError, match="not finite"):
        guard.backward(x, y)
    assert_same(model.state_dict(), before)
    assert all(gradient is None for gradient in gradients(model).values())


def test_a_loss_that_is_not_finite_is_refused_even_if_its_gradient_is():
    guard = Guard(network(), lambda output, y: F.cross_entropy(output, y) + math.nan, None)
    with pytest.raises(FedveilError, match="not finite"):
        guard.backward(*data())


def test_an_upload_that_is_not_finite_is_refused():
    model = network()
    guard = Guard(model, F.cross_entropy, None)
    with torch.no_grad():
        model[4].bias[0] = math.inf
    with pytest.raises(FedveilError, match="not finite"):
        guard.upload()


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(FedveilError, match="no parameters to train"):
        Guard(network().requires_grad_(False), F.cross_entropy, None)


def test_a_defense_on_the_server_is_refused():
    @declared
    class OnServer(Defense):
        name = "on-server"
        place = "server"

    with pytest.raises(FedveilError, match="on-server acts on the server"):
        Guard(network(), F.cross_entropy, OnServer())


# ---- memory -----------------------------------------------------------------------------------------------


@declared
class Counter(Defense):
    """Counts steps in its memory."""

    name = "counter"

    def protect(self, update, batch):
        batch.state["steps"] = batch.state.get("steps", torch.zeros(1)) + 1
        return update


@declared
class LastingCounter(Counter):
    name = "lasting-counter"
    state_scope = "run"


def steps(guard):
    return [float(state.get("steps", torch.zeros(1))) for state in guard._states]


def test_a_new_round_forgets_what_lasts_a_round():
    guard = Guard(network(), F.cross_entropy, [Counter(), LastingCounter()])
    for _ in range(2):
        guard.backward(*data())
    assert steps(guard) == [2, 2]
    guard.new_round()
    assert steps(guard) == [0, 2]
    guard.backward(*data())
    assert steps(guard) == [1, 3]


def test_rounds_draw_anew():
    model = network()
    guard = Guard(model, F.cross_entropy, GaussianNoise(sigma=1.0), seed=0)
    found = []
    for _ in range(2):
        model.zero_grad()
        guard.backward(*data())
        found.append(model[4].weight.grad.clone())
        guard.new_round()
    assert not torch.equal(*found)


def test_state_survives_a_restart():
    chain = Chain.of([LastingCounter(), Counter(), GaussianNoise(sigma=1.0)])

    def go_on(guard):
        guard.model.zero_grad()
        guard.backward(*data())
        return guard.model[4].weight.grad.clone()

    first = Guard(network(), F.cross_entropy, chain, seed=5)
    first.backward(*data())
    first.new_round()
    first.backward(*data())
    saved = copy.deepcopy(first.state_dict())
    second = Guard(network(), F.cross_entropy, chain, seed=5)
    second.load_state_dict(saved)
    assert steps(second)[:2] == [2, 0]  # memory of a round is not saved
    assert_same(go_on(second), go_on(first))
    assert float(saved["states"][0]["steps"]) == 2  # what was saved does not move on with it


def test_state_of_another_defense_is_refused_by_name():
    saved = Guard(network(), F.cross_entropy, GaussianNoise()).state_dict()
    with pytest.raises(FedveilError, match="belongs to the defense gaussian-noise, not to clip"):
        Guard(network(), F.cross_entropy, Clip()).load_state_dict(saved)
