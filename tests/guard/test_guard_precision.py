"""`Guard` under autocast and with a GradScaler."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.errors import FedveilError
from fedveil.guard.guard import Guard


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(size=6):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(size, 6, generator=generator), torch.arange(size) % 3


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# ---- GradScaler ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["none", "clip:norm=0.05", "dp-sgd:clip=0.05,noise_multiplier=0.1", "fedem:steps=2"])
@pytest.mark.parametrize("scope", [False, True])
def test_a_step_with_a_scaler_is_the_step_without_one(spec, scope):
    x, y = data()
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)):
        model = network()
        guard = Guard(model, F.cross_entropy, spec, seed=0, batch_size=6, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            if scope:
                with guard.accumulate():
                    guard.backward(x, y)
            else:
                guard.backward(x, y)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        found.append(model.state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)
    assert not torch.equal(found[0]["0.weight"], network().state_dict()["0.weight"])


def test_small_gradients_survive_float16_with_a_scaler_as_in_plain_torch():
    """The backward pass itself is scaled: a gradient of 1e-9 is nothing in float16."""
    x, y = data()

    def loss(output, targets):
        return 1e-7 * F.cross_entropy(output.float(), targets)

    plain, guarded = network(), network()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20) for _ in range(2)]
    guard = Guard(guarded, loss, "clip:norm=1e6", scaler=scalers[1])
    with torch.autocast("cpu", torch.float16):
        value = loss(plain(x), y)
    scalers[0].scale(value).backward()
    with torch.autocast("cpu", torch.float16):
        returned = guard.backward(x, y)
    torch.testing.assert_close(returned, value.detach())
    torch.testing.assert_close(gradients(guarded), gradients(plain))
    lost = network()
    with torch.autocast("cpu", torch.float16):
        Guard(lost, loss, "clip:norm=1e6", scaler=torch.amp.GradScaler("cpu", enabled=False)).backward(x, y)
    assert float(lost[0].weight.grad.norm()) < 0.9 * float(guarded[0].weight.grad.norm()) / 2**20


@pytest.mark.parametrize("scope", [False, True])
def test_an_overflow_makes_the_scaler_skip_the_step_and_shows_nothing(scope):
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    guard = Guard(model, lambda output, y: 1e6 * F.cross_entropy(output, y), "clip:norm=1", scaler=scaler, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    x, y = data()
    with torch.autocast("cpu", torch.float16):
        if scope:
            with guard.accumulate():
                guard.backward(x[:3], y[:3])
                guard.backward(x[3:], y[3:])
        else:
            guard.backward(x, y)
    assert all(gradient.isinf().all() for gradient in gradients(model).values())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_float16_without_a_scaler_is_refused():
    model = network()
    guard = Guard(model, F.cross_entropy, "clip")
    refused = pytest.raises(FedveilError, match=r"float16 needs a GradScaler.*scaler=scaler")
    with refused, torch.autocast("cpu", torch.float16):
        guard.backward(*data())
    assert model[0].weight.grad is None
    guard.backward(*data())  # outside it is as ever


# ---- autocast -----------------------------------------------------------------------------------------------


def test_under_autocast_the_gradient_is_that_of_plain_torch():
    """The forward pass runs in bfloat16; the backward pass follows it, outside of autocast, as torch's manual asks."""
    x, y = data()
    plain, guarded = network(), network()
    with torch.autocast("cpu", torch.bfloat16):
        output = plain(x)
        assert output.dtype == torch.bfloat16
        loss = F.cross_entropy(output, y)
    loss.backward()
    guard = Guard(guarded, F.cross_entropy, "clip:norm=1e6")
    with torch.autocast("cpu", torch.bfloat16):
        returned = guard.backward(x, y)
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(returned, loss.detach())
    torch.testing.assert_close(gradients(guarded), gradients(plain), rtol=0, atol=0)
    full = network()
    Guard(full, F.cross_entropy, "clip:norm=1e6").backward(x, y)
    assert not torch.equal(full[0].weight.grad, guarded[0].weight.grad)


def test_the_defense_itself_works_in_full_precision():
    seen = []

    def watched(output, y):
        seen.append(output.dtype)
        return F.cross_entropy(output, y)

    model = network()
    guard = Guard(model, watched, "clip:norm=1e-3+dp-sgd:noise_multiplier=1e-9", seed=0, batch_size=6)
    with torch.autocast("cpu", torch.bfloat16):
        guard.backward(*data())
    assert set(seen) == {torch.bfloat16}
    total = torch.cat([g.flatten() for g in gradients(model).values()]).norm()
    assert total == pytest.approx(1e-3, rel=1e-4)


def test_one_autocast_around_the_whole_loop_sees_the_weights_as_they_are():
    """Autocast caches weights in bfloat16: the cache must not outlive a step, or a defense's own step."""
    x, y = data()
    found = []
    for around in (True, False):
        model = network()
        guard = Guard(model, F.cross_entropy, "fedem:steps=3,inner_lr=5,radius=1", seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    guard.backward(x, y)
                optimizer.step()
        found.append(model.state_dict())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
