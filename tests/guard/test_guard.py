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
from fedveil.defenses.noise import GaussianNoise
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.guard.guard import Guard


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
    for step in range(3):  # without a defense gradients add up over batches; buffers move
        x, y = data(step)
        if isinstance(defense, GradientDropout):
            plain.zero_grad()
            guarded.zero_grad()
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

    def protect(self, update, call):
        call.state["steps"] = call.state.get("steps", torch.zeros(1)) + 1
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
        guard.model.zero_grad()
        guard.backward(*data())
    assert steps(guard) == [2, 2]
    guard.new_round()
    assert steps(guard) == [0, 2]
    guard.model.zero_grad()
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
    go_on(first)
    first.new_round()
    go_on(first)
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


# ---- several clients in one process -----------------------------------------------------------------------


def noise_of(client):
    model = network()
    guard = Guard(model, F.cross_entropy, GaussianNoise(sigma=1.0), seed=7, client=client)
    guard.backward(*data())
    return model[4].weight.grad, guard


def test_clients_with_one_seed_draw_noise_of_their_own():
    (first, one), (second, _), (again, _) = noise_of(3), noise_of(4), noise_of(3)
    assert torch.equal(first, again)
    assert not torch.isin(first, second).any()
    with pytest.raises(FedveilError, match="belongs to client 3, not to client 4"):
        noise_of(4)[1].load_state_dict(one.state_dict())
    noise_of(3)[1].load_state_dict(one.state_dict())


# ---- the model as it is now ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Uses a plain attribute, a bound method kept in one, and a layer kept in a list."""

    def __init__(self):
        super().__init__()
        self.layer, self.factor, self.hidden = nn.Linear(6, 3), 1.0, [nn.Tanh()]
        self.call = self.scaled

    def scaled(self, x):
        return self.factor * self.layer(self.hidden[0](x))

    def forward(self, x):
        return self.call(x)


def small_data(size=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(size, 6, generator=generator).to(dtype), torch.arange(size) % 3


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "factor", 3.0),
        lambda m: m.hidden.__setitem__(0, nn.ReLU()),
        lambda m: setattr(m, "layer", nn.Linear(6, 3, dtype=torch.float32)),
        lambda m: m.layer.register_forward_hook(lambda module, args, output: 2 * output),
        lambda m: setattr(m, "call", lambda x: m.layer(x) ** 2),
    ],
    ids=["attribute", "activation", "layer", "hook", "method"],
)
def test_whatever_changes_in_the_model_counts_at_once(change):
    torch.manual_seed(0)
    model = Scaled()
    guard = Guard(model, F.cross_entropy, None)
    guard.backward(*small_data())
    before = model.layer.weight.grad
    model.zero_grad()
    change(model)
    x, y = small_data()
    F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    model.zero_grad()
    guard.backward(x, y)
    assert_same(gradients(model), expected)
    assert not torch.equal(before, model.layer.weight.grad)


def test_a_changed_rate_of_dropout_counts_at_once():
    model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3))
    guard = Guard(model, F.cross_entropy, None, seed=0)
    dropped = []
    for p in (0.5, 0.0, 0.9):
        model.zero_grad()
        model[1].p = p
        guard.backward(*small_data(1))
        dropped.append(float((model[2].weight.grad == 0).float().mean()))
    assert 0.2 < dropped[0] < 0.8
    assert dropped[1] == 0
    assert dropped[2] > 0.75


def test_the_model_is_as_it_was_after_every_pass():
    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError("as it must")

    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    model.append(Fails())
    kept = dict(model.named_parameters()) | dict(model.named_buffers())
    places = {name: tensor.data_ptr() for name, tensor in kept.items()}
    guard = Guard(model, F.cross_entropy, "fedem:steps=3", seed=0)
    for fails in (True, False):
        model[4] = Fails() if fails else nn.Identity()
        if fails:
            with pytest.raises(ArithmeticError):
                guard.backward(*small_data())
        else:
            guard.backward(*small_data())
        now = dict(model.named_parameters()) | dict(model.named_buffers())
        assert all(now[name] is tensor and tensor.data_ptr() == places[name] for name, tensor in kept.items())
        assert "forward" not in vars(model[2])
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_loss_whose_graph_the_loop_already_holds_is_not_disturbed():
    model = network()
    penalty = (model[4].weight ** 2).sum()
    Guard(model, F.cross_entropy, "fedem:steps=2", seed=0).backward(*data())
    protected = model[4].weight.grad.clone()
    penalty.backward()
    assert_same(model[4].weight.grad, protected + 2 * model[4].weight.detach())


# ---- precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["none", "clip:norm=0.1+gaussian-noise", "fedem:steps=2", "dp-sgd", "soteria"])
def test_models_of_any_floating_type(dtype, spec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    plain = copy.deepcopy(model)
    x, y = small_data(dtype=dtype)
    F.cross_entropy(plain(x), y).backward()
    guard = Guard(model, F.cross_entropy, spec, seed=0, batch_size=6)
    guard.backward(x, y)
    assert all(gradient.dtype == dtype and gradient.isfinite().all() for gradient in gradients(model).values())
    if spec == "none":
        assert_same(gradients(model), gradients(plain))
    model.zero_grad()
    with guard.accumulate():
        guard.backward(x[:4], y[:4])
        guard.backward(x[4:], y[4:])
    assert all(gradient.dtype == dtype and gradient.isfinite().all() for gradient in gradients(model).values())
    assert all(tensor.dtype == dtype for tensor in guard.upload().values())


def test_models_of_mixed_types():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 5).double(), nn.Linear(5, 3).bfloat16()

        def forward(self, x):
            return self.second(self.first(x.double()).bfloat16()).float()

    model = Mixed()
    Guard(model, F.cross_entropy, "clip:norm=0.01+gaussian-noise:sigma=0", seed=0).backward(*small_data())
    assert model.first.weight.grad.dtype == torch.float64
    assert model.second.weight.grad.dtype == torch.bfloat16
    total = torch.cat([g.double().flatten() for g in gradients(model).values()]).norm()
    assert total == pytest.approx(0.01, rel=1e-2)


def test_gradients_of_a_sparse_embedding():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 3)

        def forward(self, ids):
            return self.head(self.embed(ids).mean(1))

    model = Bag()
    plain = copy.deepcopy(model)
    ids, y = torch.randint(0, 11, (4, 5)), torch.tensor([0, 1, 2, 0])
    F.cross_entropy(plain(ids), y).backward()
    Guard(model, F.cross_entropy, "clip:norm=1e6").backward(ids, y)
    torch.testing.assert_close(model.embed.weight.grad, plain.embed.weight.grad.to_dense())


# ---- wrong batches and losses -------------------------------------------------------------------------------


X, Y = small_data()


@pytest.mark.parametrize(
    "inputs, targets, words",
    [
        ((X, X), Y, "inputs must be one tensor, or a dict of tensors.*not a tuple of Tensor"),
        ([X], Y, "inputs must be one tensor.*not a list of Tensor"),
        ({"x": [1, 2]}, Y, "inputs must be one tensor.*not a dict of list"),
        (None, Y, "inputs must be one tensor.*not a NoneType"),
        (X, {"labels": Y}, "targets must be one tensor.*not a dict of Tensor"),
        (X, [0, 1, 2, 0, 1, 2], "targets must be one tensor.*not a list of int"),
        (X, torch.tensor(1), r"targets must be one tensor.*not a tensor of shape \(\)"),
        (X, Y[:4], "6 examples but 4 targets"),
        (X[:0], Y[:0], "the batch has no examples"),
    ],
)
def test_batches_that_cannot_be_used_are_refused_in_one_line(inputs, targets, words):
    model = nn.Linear(6, 3)
    with pytest.raises(FedveilError, match=words) as error:
        Guard(model, F.cross_entropy, "clip").backward(inputs, targets)
    assert "\n" not in str(error.value)
    assert model.weight.grad is None


@pytest.mark.parametrize(
    "loss, words",
    [
        (lambda output, y: F.cross_entropy(output, y, reduction="none"), r"not a tensor of shape \(6,\)"),
        (lambda output, y: F.cross_entropy(output, y).item(), "not a float"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused(loss, words):
    with pytest.raises(FedveilError, match=f"the loss must be one number.*{words}"):
        Guard(nn.Linear(6, 3), loss, "clip").backward(X, Y)


def test_a_change_of_other_parameters_than_at_the_start_of_the_round_is_refused():
    model = network()
    model[0].requires_grad_(False)
    guard = Guard(model, F.cross_entropy, None)
    model[0].requires_grad_(True)
    with pytest.raises(FedveilError, match="other parameters are trained"):
        guard.upload(of="delta")
    guard.new_round()
    assert "0.weight" in guard.upload(of="delta")
