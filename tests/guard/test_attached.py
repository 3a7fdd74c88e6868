"""`Guard.attach`: the defense acts just before an optimizer's step, in loops that call `loss.backward()` themselves."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.defenses.base import Defense
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.guard.guard import Guard
from fedveil.registry import defenses as registry
from fedveil.tree import Tree


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(seed=0, size=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.arange(size) % 3


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def norm(model):
    return math.hypot(*[parameter.grad.norm().item() for parameter in model.parameters()])


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def trained_by(spec, steps, *, attached, optimizer=torch.optim.SGD, **options):
    model = network()
    guard = Guard(model, F.cross_entropy, spec, seed=0)
    moves = optimizer(model.parameters(), lr=0.1, **options)
    if attached:
        guard.attach(moves)
    for step in range(steps):
        moves.zero_grad()
        x, y = data(step)
        if attached:
            F.cross_entropy(model(x), y).backward()
        else:
            guard.backward(x, y)
        moves.step()
    return model, guard


# ---- the same as `backward` ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["none", "clip:norm=0.05", "gradient-dropout", "clip:norm=0.1+gaussian-noise", "sign-compression"]
)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_attached_guard_trains_as_backward_does(spec, optimizer):
    attached, guard = trained_by(spec, 3, attached=True, optimizer=optimizer)
    called, other = trained_by(spec, 3, attached=False, optimizer=optimizer)
    torch.testing.assert_close(attached.state_dict(), called.state_dict(), rtol=1e-6, atol=1e-7)
    assert guard.ledger.state_dict() == other.ledger.state_dict()
    assert not torch.equal(attached[0].weight, network()[0].weight)


def test_every_defense_of_the_gradient_alone_can_be_attached_and_every_other_is_refused():
    able, refused = set(), set()
    for name in registry.entries():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            guard = Guard(model, None, name, batch_size=6, validation=data())
            guard.attach(optimizer)
        except FedveilError:
            refused.add(name)
            continue
        able.add(name)
        x, y = data()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert {
        "gradient-dropout",
        "clip",
        "gaussian-noise",
        "dp-gaussian",
        "gradient-pruning",
        "ldpm",
        "sign-compression",
    } <= able
    assert {"dp-sgd", "fedem", "soteria", "fedbarre", "spm", "ldp-fl"} <= refused


@pytest.mark.parametrize(
    "spec, words",
    [
        ("dp-sgd", "dp-sgd needs the data behind a gradient, and an optimizer has only the gradient"),
        ("fedem", "fedem needs the data behind a gradient"),
        ("soteria", "soteria needs the data behind a gradient"),
        ("clip+soteria", "soteria needs the data behind a gradient"),
        ("spm", "protects the upload, not a gradient"),
    ],
)
def test_what_cannot_protect_a_gradient_alone_is_refused_at_once(spec, words):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(FedveilError, match=words):
        Guard(model, None, spec, batch_size=6).attach(optimizer)
    assert not optimizer._optimizer_step_pre_hooks


# ---- loops of all kinds -------------------------------------------------------------------------------------


def test_micro_batches_are_protected_once_together():
    model, whole = network(), network()
    guard = Guard(model, None, "clip:norm=0.05")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer)
    x, y = data()
    for inputs, targets in zip(x.split(2), y.split(2), strict=True):
        (F.cross_entropy(model(inputs), targets) / 3).backward()
    F.cross_entropy(whole(x), y).backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
    optimizer.step()
    torch.testing.assert_close(gradients(model), gradients(whole), rtol=1e-4, atol=1e-7)
    assert guard.ledger.state_dict()["spent"][0]["times"] == 1


def test_the_users_own_clipping_comes_first_and_the_defense_has_the_last_word():
    model = network()
    guard = Guard(model, None, "gaussian-noise:sigma=0.5", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    optimizer.step()
    entries = sum(parameter.numel() for parameter in model.parameters())
    assert norm(model) == pytest.approx(0.5 * math.sqrt(entries), rel=0.3)  # noise on every entry, unclipped


@pytest.mark.parametrize("as_keyword", [False, True])
def test_the_gradients_of_a_closure_are_protected(as_keyword):
    model, other = network(), network()
    x, y = data()
    for trained, attach in ((model, True), (other, False)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        if attach:
            guard = Guard(trained, None, "clip:norm=0.05")
            guard.attach(optimizer)

        def closure(trained=trained, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(trained(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
        assert loss.item() > 0.5
    assert norm(model) == pytest.approx(0.05, rel=1e-4)
    assert norm(other) > 0.06
    assert guard.ledger.state_dict()["spent"][0]["times"] == 1


def test_every_evaluation_of_an_optimizer_that_asks_several_times_counts():
    model = network()
    guard = Guard(model, None, "clip:norm=0.05")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    guard.attach(optimizer)
    x, y = data()
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        calls.append(norm(model))
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    assert guard.ledger.state_dict()["spent"][0]["times"] == len(calls)
    assert norm(model) == pytest.approx(0.05, rel=1e-4)


def test_no_gradient_at_all_releases_nothing_and_a_missing_one_is_protected_as_zero():
    model = network()
    guard = Guard(model, None, "gaussian-noise:sigma=0.1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer)
    optimizer.step()
    assert guard.ledger.state_dict()["spent"] == []
    model[2].weight.sum().backward()  # the first layer has no part in this
    optimizer.step()
    assert model[0].weight.grad.std().item() == pytest.approx(0.1, rel=0.5)


# ---- half precision -----------------------------------------------------------------------------------------


def test_under_autocast_to_bfloat16_the_defense_works_in_full_precision():
    model = network()
    guard = Guard(model, None, "clip:norm=0.05")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer)
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        assert output.dtype == torch.bfloat16
        F.cross_entropy(output, y).backward()
        optimizer.step()
    assert norm(model) == pytest.approx(0.05, rel=1e-5)
    assert model[0].weight.grad.dtype == torch.float32


def test_a_model_of_bfloat16_keeps_its_type():
    model = network().bfloat16()
    guard = Guard(model, None, "clip:norm=0.05+gaussian-noise:sigma=0.01")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer)
    x, y = data()
    F.cross_entropy(model(x.bfloat16()), y).backward()
    optimizer.step()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert norm(model) < 0.05 + 3 * 0.01 * math.sqrt(83)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_hands_over_true_gradients(unscale):
    model = network()
    guard = Guard(model, None, "clip:norm=0.05")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = data()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert norm(model) == pytest.approx(0.05, rel=1e-4)
    assert guard.ledger.state_dict()["spent"][0]["times"] == 1


def test_an_optimizer_that_unscales_inside_its_step_is_refused_unless_unscaled_first():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    guard = Guard(model, None, "clip:norm=0.05")
    guard.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = data()
    before = model[0].weight.clone()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(FedveilError, match=r"scaler\.unscale_"):
        scaler.step(optimizer)
    assert torch.equal(model[0].weight, before)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    guard = Guard(model, None, "clip:norm=0.05")
    guard.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert norm(model) == pytest.approx(0.05, rel=1e-4)

    scaler.update()
    optimizer.zero_grad()
    before = model[0].weight.clone()
    scaler.scale(F.cross_entropy(model(x * torch.inf), y)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)  # overflowed: the optimizer itself skips it
    assert torch.equal(model[0].weight, before)


# ---- what fails closed --------------------------------------------------------------------------------------


@declared
class Spoils(Defense):
    """A defense with a mistake."""

    place = "gradient"
    way: str = "nan"

    def protect(self, update, call):
        if self.way == "nan":
            return update.map(lambda tensor: tensor * torch.nan)
        return Tree({name: tensor[..., :1] for name, tensor in update.items()})


@pytest.mark.parametrize("way, words", [("nan", "protected gradient is not finite"), ("shape", "of shape")])
def test_a_defense_that_spoils_the_gradient_stops_the_step(way, words):
    model = network()
    guard = Guard(model, None, Spoils(way=way))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(FedveilError, match=words):
        optimizer.step()
    assert_same(model.state_dict(), network().state_dict())
    assert guard.ledger.state_dict()["spent"] == []


def test_a_gradient_that_is_not_finite_stops_the_step():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Guard(model, None, "gradient-dropout").attach(optimizer)
    x, y = data()
    (F.cross_entropy(model(x), y) * torch.nan).backward()
    with pytest.raises(FedveilError, match=r"the gradient is not finite .* did not step"):
        optimizer.step()
    assert_same(model.state_dict(), network().state_dict())


def test_a_sparse_gradient_stops_the_step():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Guard(model, None, "clip").attach(optimizer)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(FedveilError, match="sparse"):
        optimizer.step()


def test_the_optimizer_must_hold_the_model_and_no_more():
    model, other = network(), nn.Linear(2, 2)
    guard = Guard(model, None, "clip")
    some = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(FedveilError, match=r"does not hold 2\.weight"):
        guard.attach(some)
    more = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(FedveilError, match="not in the guarded model"):
        guard.attach(more)
    assert not some._optimizer_step_pre_hooks
    assert not more._optimizer_step_pre_hooks
    with pytest.raises(FedveilError, match="an optimizer of torch, not int"):
        guard.attach(3)
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(later)
    later.add_param_group({"params": other.parameters()})
    with pytest.raises(FedveilError, match="not in the guarded model"):
        later.step()
    other.requires_grad_(False)
    later.step()  # what is frozen does not move


def test_a_frozen_layer_is_left_out():
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Guard(model, None, "gaussian-noise").attach(optimizer)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, network()[0].weight)


def test_a_gradient_is_not_protected_twice():
    model = network()
    guard = Guard(model, F.cross_entropy, "clip")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard.attach(optimizer) as attached:
        with pytest.raises(FedveilError, match="is attached to an optimizer"):
            guard.backward(*data())
        with pytest.raises(FedveilError, match="is attached to an optimizer"):
            guard.attach(optimizer)
        with pytest.raises(FedveilError, match="is attached to an optimizer"), guard.accumulate():
            pass
    assert not attached.active
    guard.backward(*data())


def test_a_removed_attachment_leaves_the_optimizer_as_it_was():
    model, plain = network(), network()
    guard = Guard(model, None, GradientDropout(keep=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer).remove()
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(plain(x), y).backward()
    optimizer.step()
    assert_same(gradients(model), gradients(plain))
    assert guard.ledger.state_dict()["spent"] == []


def test_a_guard_without_a_loss_says_so():
    with pytest.raises(FedveilError, match="this Guard has no loss"):
        Guard(network(), None, "clip").backward(*data())


# ---- what went out ------------------------------------------------------------------------------------------


def test_what_was_spent_and_what_a_server_sees():
    model = network()
    guard = Guard(model, None, "dp-gaussian:epsilon=1,delta=1e-5")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer, for_capture=True)
    before = None
    for step in range(3):
        optimizer.zero_grad()
        x, y = data(step)
        F.cross_entropy(model(x), y).backward()
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        optimizer.step()
    assert "over 3 releases" in guard.spent().sentence
    with pytest.raises(FedveilError, match="give batch_sizes="):
        guard.capture()
    seen = guard.capture(batch_sizes=[6])
    assert_same(dict(seen.before), before)
    assert_same(dict(seen.shared), gradients(model))


def test_a_capture_without_kept_weights_is_refused_after_the_step():
    _, guard = trained_by("clip", 1, attached=True)
    with pytest.raises(FedveilError, match="for_capture=True"):
        guard.capture(batch_sizes=[6])


def test_a_captured_gradient_does_not_move_with_grad():
    model = network()
    guard = Guard(model, None, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer, for_capture=True)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    sent = gradients(model)
    optimizer.zero_grad(set_to_none=False)
    assert_same(dict(guard.capture(batch_sizes=[6]).shared), sent)


def test_an_upload_after_attached_steps_counts_as_protected():
    model = network()
    guard = Guard(model, None, "gradient-dropout+spm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.attach(optimizer)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    guard.upload()
    assert {line["chain"] for line in guard.ledger.state_dict()["spent"]} == {str(guard.chain)}
