"""The callback for skorch, in a real net."""

import math

import pytest
import torch
from torch import nn

from fedveil.errors import FedveilError

skorch = pytest.importorskip("skorch")
from fedveil.loops.skorch import GuardCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)


class Accumulating(skorch.NeuralNetClassifier):
    """Gradient accumulation as skorch's documentation has it, and bfloat16."""

    together = 3
    half = False

    def train_step_single(self, batch, **fit_params):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            return super().train_step_single(batch, **fit_params)

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        return super().get_loss(y_pred.float(), y_true, *args, **kwargs) / self.together

    def train_step(self, batch, **fit_params):
        self.count = getattr(self, "count", 0) + 1
        step = self.train_step_single(batch, **fit_params)
        if self.count % self.together == 0:
            self.notify("on_grad_computed", named_parameters=[], batch=batch)
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


def data(size=12):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 6, generator=generator), torch.arange(size) % 3


def net(*callbacks, kind=skorch.NeuralNetClassifier):
    return kind(
        Module,
        criterion=nn.CrossEntropyLoss,
        lr=0.1,
        batch_size=2,
        max_epochs=1,
        train_split=None,
        verbose=0,
        callbacks=list(callbacks),
    )


def guarded(spec, **settings):
    return "guard", GuardCallback(spec, settings)


def guard_of(fitted):
    return dict(fitted.callbacks_)["guard"].guard


def releases(fitted):
    return sum(line["times"] for line in guard_of(fitted).ledger.state_dict()["spent"])


def norm(fitted):
    return math.hypot(*[parameter.grad.norm().item() for parameter in fitted.module_.parameters()])


def test_every_step_is_protected_once():
    fitted = net(guarded("clip:norm=0.01")).fit(*data())
    assert norm(fitted) == pytest.approx(0.01, rel=1e-4)
    assert releases(fitted) == 6


@pytest.mark.parametrize("half", [False, True])
def test_micro_batches_are_protected_once_together(half):
    made = net(guarded("clip:norm=0.01"), kind=Accumulating)
    made.half = half
    norms = []
    made.initialize()
    made.optimizer_.register_step_post_hook(lambda *_: norms.append(norm(made)))
    made.partial_fit(*data())
    assert releases(made) == 2
    assert norms == pytest.approx([0.01, 0.01], rel=1e-4)


def test_skorchs_own_clipping_comes_before_the_defense():
    clipping = skorch.callbacks.GradientNormClipping(1e-6)
    fitted = net(guarded("gaussian-noise:sigma=0.5"), ("clip", clipping)).fit(*data())
    assert norm(fitted) > 0.5 * math.sqrt(sum(p.numel() for p in fitted.module_.parameters())) * 0.7


def test_no_defense_trains_as_skorch_does():
    one, other = net(guarded("none")).fit(*data()), net().fit(*data())
    torch.testing.assert_close(one.module_.state_dict(), other.module_.state_dict(), rtol=0, atol=0)


def test_partial_fit_goes_on_and_fit_starts_afresh():
    made = net(guarded("dp-gaussian:epsilon=1", client=3)).fit(*data())
    made.partial_fit(*data())
    assert releases(made) == 12
    assert guard_of(made).state_dict()["round"] == 2
    assert guard_of(made).state_dict()["client"] == 3
    made.fit(*data())
    assert releases(made) == 6


def test_a_step_that_cannot_be_protected_is_not_taken():
    x, y = data()
    made = net(guarded("clip"))
    with pytest.raises(FedveilError, match="not finite"):
        made.fit(x * torch.nan, y)
    torch.testing.assert_close(made.module_.state_dict(), Module().state_dict(), rtol=0, atol=0)


def test_a_defense_that_needs_the_data_is_refused_before_training():
    with pytest.raises(FedveilError, match="soteria needs the data behind a gradient"):
        net(guarded("soteria")).initialize()
