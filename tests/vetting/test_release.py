"""The release gate: an undefended update is withheld, a strongly noised one passes, and it fails closed."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import fedveil as fv
from fedveil.errors import FedveilError
from fedveil.vetting.release import Decision, ReleaseGate

DIGITS = load_digits()
X = torch.as_tensor(DIGITS.images[:, None] / 16, dtype=torch.float32)
Y = torch.as_tensor(DIGITS.target)
OTHERS = X[100:600], Y[100:600]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))


def update(spec, size=1, model=None):
    guard = fv.Guard(model or network(), F.cross_entropy, spec)
    guard.backward(X[:size], Y[:size])
    return guard.capture(), guard.model


def decided(gate, spec, size=1, **changes):
    seen, model = update(spec, size)
    given = {"batch": (X[:size], Y[:size]), "others": OTHERS, "defense": spec, **changes}
    return gate.decide(seen, model, F.cross_entropy, **given)


@pytest.mark.parametrize("size", [1, 4])
def test_an_undefended_update_is_withheld(size):
    found = decided(ReleaseGate(), "none", size)
    assert not found.send
    assert found.linked == 1.0
    assert found.reason == "its batch is told from 100% of others"
    with pytest.raises(FedveilError, match="the update is withheld: its batch is told from"):
        found.require()


def test_a_strongly_noised_update_passes():
    """Of what tells nothing, the true batch stands at a random place: with 20 of them, nearly all pass a mild limit."""
    gate = ReleaseGate(most_linked=0.99, attack=None)
    found = [decided(gate, "gaussian-noise:sigma=100") for _ in range(20)]
    assert sum(each.send for each in found) >= 14  # each fails by a chance of 1 in 40
    assert 0.25 < sum(each.linked for each in found) / 20 < 0.75
    rebuilt = decided(ReleaseGate(most_linked=1.0, attack="inverting-gradients:steps=10"), "gaussian-noise:sigma=100")
    assert rebuilt.send
    assert rebuilt.reconstructed <= 0.3
    rebuilt.require()


def test_what_a_quick_inversion_rebuilds_is_withheld():
    found = decided(ReleaseGate(most_linked=1.0, attack="inverting-gradients:steps=100"), "none")
    assert not found.send
    assert found.reconstructed > 0.5
    assert "of an example is rebuilt from it" in found.reason


def test_an_upload_of_local_training_is_judged_too():
    model = network()
    guard = fv.Guard(model, F.cross_entropy, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 4):
        optimizer.zero_grad()
        guard.backward(X[start : start + 4], Y[start : start + 4])
        optimizer.step()
    guard.upload(of="delta")
    found = ReleaseGate(attack=None).decide(
        guard.capture(lr=0.1), network(), F.cross_entropy, (X[:8], Y[:8]), others=OTHERS
    )
    assert not found.send
    assert found.linked == 1.0


def test_other_data_than_pictures_is_linked_only():
    model = nn.Linear(6, 3)
    x, y = torch.randn(60, 6), torch.arange(60) % 3
    guard = fv.Guard(model, F.cross_entropy, None)
    guard.backward(x[:2], y[:2])
    found = ReleaseGate(most_linked=1.0).decide(guard.capture(), model, F.cross_entropy, (x[:2], y[:2]), (x[2:], y[2:]))
    assert found.send
    assert (found.linked, found.reconstructed) == (1.0, None)


# ---- it fails closed ----------------------------------------------------------------------------------------


def test_what_takes_too_long_is_withheld():
    found = decided(ReleaseGate(seconds=1e-6), "gaussian-noise:sigma=100")
    assert found == Decision(False, "the attack on it was not done within 1e-06 seconds", seconds=found.seconds)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"others": (X[100:101], Y[100:101])}, "could not be attacked: there are 1 other examples"),
        ({"batch": (X[:3], Y[:3])}, "could not be attacked: it is of 1 examples, and the batch has 3"),
        ({"defense": "no-such"}, "could not be attacked: unknown defense"),
        ({"batch": (X[:1, :, :3], Y[:1])}, "the attack on it failed"),
    ],
)
def test_whatever_goes_wrong_is_withheld(changes, words):
    found = decided(ReleaseGate(), "none", **changes)
    assert not found.send
    assert words in found.reason


def test_an_error_is_told_without_its_text():
    def fails(output, targets):
        raise ValueError("the patient's name")

    seen, model = update("none")
    found = ReleaseGate().decide(seen, model, fails, (X[:1], Y[:1]), OTHERS)
    assert (found.send, found.reason) == (False, "the attack on it failed (ValueError)")


def test_the_model_is_left_as_it_is():
    seen, model = update("none")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ReleaseGate().decide(seen, model, F.cross_entropy, (X[:1], Y[:1]), OTHERS)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
