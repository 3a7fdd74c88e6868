"""What makes attacks on captures fail silently is named in one line before they start."""

import copy
import warnings

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import fedveil as fv
from fedveil.auditing.preflight import preflight
from fedveil.defenses.chain import Chain

DIGITS = load_digits()
X = torch.as_tensor(DIGITS.images[:16, None] / 16, dtype=torch.float32)
Y = torch.as_tensor(DIGITS.target[:16])
NORMALIZATION = fv.Normalization((0.3,), (0.4,))


def network(*, norm=False, drop=0.0):
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32) if norm else nn.Identity(), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Dropout(drop), nn.Linear(32, 10))


def gradient(model, size=4, x=X, scale=1.0):
    found = torch.autograd.grad(F.cross_entropy(model(x[:size]), Y[:size]), list(model.parameters()))
    return {name: scale * g for (name, _), g in zip(model.named_parameters(), found, strict=True)}


def captured(model, size=4, **changes):
    update = gradient(copy.deepcopy(model), size, **changes)
    return fv.capture(model, update, batch_sizes=size)


def truth(size=4, x=X):
    return x[:size], Y[:size]


def trained(model, steps, lr, size=4):
    """What a client sends after local steps."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=lr)
    for step in range(steps):
        place = torch.arange(step * size, (step + 1) * size) % 16
        optimizer.zero_grad()
        F.cross_entropy(own(X[place]), Y[place]).backward()
        optimizer.step()
    return own


def upload(model, *, steps, lr, told_steps=None, told_lr=None, kind="weights", size=4):
    after, before = trained(model, steps, lr, size), dict(model.named_parameters())
    update = {name: (p if kind == "weights" else p - before[name]).detach() for name, p in after.named_parameters()}
    update |= dict(after.named_buffers())
    return fv.capture(model, update, kind=kind, lr=told_lr or lr, batch_sizes=[size] * (told_steps or steps))


# ---- nothing is wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", ["gradient", "weights", "delta"])
def test_what_fits_is_not_warned_of(norm, kind):
    model = network(norm=norm)
    seen = captured(model) if kind == "gradient" else upload(model, steps=3, lr=0.1, kind=kind)
    size = 4 if kind == "gradient" else 12
    assert preflight(seen, model) == []
    assert preflight(seen, model, truth=truth(size), normalization=NORMALIZATION) == []


def test_under_a_defense_the_update_is_not_compared():
    model = network()
    guard = fv.Guard(model, F.cross_entropy, "gaussian-noise:sigma=1")
    guard.backward(*truth())
    assert preflight(guard.capture(), model, truth=truth()) == []
    assert preflight(captured(model, scale=-1.0), model, truth=truth(), defense=Chain.of("gaussian-noise")) == []


# ---- each mistake in one line -------------------------------------------------------------------------------


def only(lines):
    (line,) = lines
    assert "\n" not in line
    return line


@pytest.mark.parametrize("told, words", [(0.01, "10 times"), (1.0, "0.1 times")])
def test_a_wrong_learning_rate(told, words):
    model = network()
    seen = upload(model, steps=1, lr=0.1, told_lr=told)
    line = only(preflight(seen, model, truth=truth()))
    assert line.startswith(f"the update is {words} as long as 1 steps at lr {told:g} make it: the learning rate or")


@pytest.mark.parametrize("told, actual", [(2, 4), (4, 2)])
def test_a_wrong_number_of_steps(told, actual):
    model = network()
    seen = upload(model, steps=actual, lr=0.1, told_steps=told)
    line = only(preflight(seen, model, truth=truth(16)))  # all examples of the client
    assert line == f"the update fits {actual} local steps, and the capture says {told}: the number of steps is wrong"


def test_local_epochs_that_were_not_counted():
    model = network()
    seen = upload(model, steps=3, lr=0.1, told_steps=1, size=16)
    assert "the learning rate or the number of steps is wrong" in only(preflight(seen, model, truth=truth(16)))


def test_a_learning_rate_far_too_small_shows_without_the_truth():
    model = network()
    line = only(preflight(upload(model, steps=1, lr=0.1, told_lr=0.001, size=2), model))
    assert "times as long as cross-entropy can make it" in line


def test_a_loss_that_is_a_sum():
    model = network()
    line = only(preflight(captured(model, 4, scale=4.0), model, truth=truth()))
    assert line == "the update is 4 times the mean gradient of its examples: the loss was not a mean over the batch"


def test_steps_that_batch_norm_counted():
    model = network(norm=True)
    seen = upload(model, steps=3, lr=0.1, told_steps=2)
    assert "batch norm counted 3 steps, and the capture says 2: the steps are wrong" in preflight(seen, model)


def test_batch_norm_in_another_mode():
    model = network(norm=True)
    seen = upload(model, steps=1, lr=0.1)
    found = preflight(seen, model.eval())
    assert only(found).startswith("batch norm was in training mode, for its statistics moved")
    model = network(norm=True).eval()
    assert "batch norm was in evaluation mode" in only(preflight(upload(model, steps=1, lr=0.1), model.train()))
    seen = captured(network(norm=True))  # a gradient, without buffers
    line = only(preflight(seen, network(norm=True).eval(), truth=truth()))
    assert line == "batch norm was in training mode, and the model is in evaluation mode: call model.train()"


def test_active_dropout():
    model = network(drop=0.5)
    torch.manual_seed(3)
    seen = captured(model)
    assert "dropout is active in the model" in only(preflight(seen, model))
    assert "dropout was active" in only(preflight(seen, model.eval(), truth=truth()))
    quiet = captured(network(drop=0.5).eval())
    assert preflight(quiet, network(drop=0.5).eval(), truth=truth()) == []
    assert "call model.eval()" in preflight(quiet, network(drop=0.5).train(), truth=truth())[0]


def test_a_normalization_mismatch():
    model = network()
    normal = NORMALIZATION.normalize(X)
    line = only(preflight(captured(model, x=normal), model, truth=truth(), normalization=NORMALIZATION))
    assert line == "the normalization does not match: the model took normalized pictures, and the truth has pixels"
    line = only(preflight(captured(model), model, truth=truth(x=normal), normalization=NORMALIZATION))
    assert line == "the normalization does not match: the model took pixels, and the truth has normalized pictures"


def test_a_flipped_sign():
    model = network()
    assert "the sign is flipped" in only(preflight(captured(model, scale=-1.0), model))
    assert "the sign is flipped" in preflight(captured(model, 16, scale=-1.0), model, truth=truth(16))[0]


@pytest.mark.parametrize("cut", [10, 42, 330])
def test_a_truncated_update(cut):
    model = network()
    update = gradient(copy.deepcopy(model))
    flat = torch.cat([tensor.flatten() for tensor in update.values()])
    flat[-cut:] = 0
    parts = flat.split([tensor.numel() for tensor in update.values()])
    short = {name: part.view_as(update[name]) for name, part in zip(update, parts, strict=True)}
    lines = preflight(fv.capture(model, short, batch_sizes=4), model)
    found = [line for line in lines if "it was truncated" in line]
    assert len(found) == (1 if cut >= 16 else 0)
    empty = {name: torch.zeros_like(tensor) for name, tensor in update.items()}
    assert "zero throughout" in preflight(fv.capture(model, empty, batch_sizes=4), model)[0]


def test_an_update_of_other_examples():
    model = network()
    line = only(preflight(captured(model), model, truth=(X[8:12], Y[8:12])))
    assert line.startswith("the update does not fit its examples (cosine")


# ---- where it is told ---------------------------------------------------------------------------------------


def test_an_attack_warns():
    model = network()
    seen = captured(model, 1, scale=-1.0)
    with pytest.warns(UserWarning, match="the sign is flipped"):
        fv.attack(seen, "inverting-gradients:steps=1", model=model, shape=(1, 8, 8), progress=False, backend="loop")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fv.attack(
            captured(model, 1),
            "inverting-gradients:steps=1",
            model=model,
            shape=(1, 8, 8),
            truth=truth(1),
            progress=False,
            backend="loop",
        )
