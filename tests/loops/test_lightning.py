"""The callback for Lightning, in a real `Trainer`."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedveil.errors import FedveilError

lightning = pytest.importorskip("lightning")
from fedveil.loops.lightning import GuardCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    """A classifier that keeps what its optimizer was given."""

    def __init__(self, optimizer=torch.optim.SGD):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = optimizer
        self.norms = []

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x).float(), y)

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(
            lambda *_: self.norms.append(math.hypot(*[p.grad.norm().item() for p in self.parameters()]))
        )
        return optimizer


def loader(size=12, batch=2):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(size, 6, generator=generator), torch.arange(size) % 3)
    return DataLoader(data, batch_size=batch)


def trainer(*callbacks, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    settings = {"enable_checkpointing": False, "max_epochs": 1, **quiet, **settings}
    return lightning.Trainer(callbacks=list(callbacks), **settings)


def releases(callback):
    return sum(line["times"] for line in callback.guard.ledger.state_dict()["spent"])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_every_step_is_protected_once(precision, together, optimizer):
    module, protect = Module(optimizer), GuardCallback("clip:norm=0.01")
    trainer(protect, precision=precision, accumulate_grad_batches=together).fit(module, loader())
    assert len(module.norms) == 6 // together
    assert module.norms == pytest.approx([0.01] * len(module.norms), rel=1e-4)
    assert releases(protect) == len(module.norms)


def test_lightnings_own_clipping_comes_before_the_defense():
    module, protect = Module(), GuardCallback("gaussian-noise:sigma=0.5")
    trainer(protect, gradient_clip_val=1e-6).fit(module, loader())
    entries = sum(parameter.numel() for parameter in module.parameters())
    assert min(module.norms) > 0.5 * math.sqrt(entries) * 0.7


def test_no_defense_trains_as_lightning_does():
    guarded, plain = Module(), Module()
    trainer(GuardCallback("none")).fit(guarded, loader())
    trainer().fit(plain, loader())
    torch.testing.assert_close(guarded.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_second_fit_is_a_new_round_of_the_same_guard():
    module, protect = Module(), GuardCallback("dp-gaussian:epsilon=1")
    trainer(protect).fit(module, loader())
    first = protect.guard
    trainer(protect).fit(module, loader())
    assert protect.guard is first
    assert releases(protect) == 12
    assert protect.guard.state_dict()["round"] == 2
    assert "over 12 releases" in protect.guard.spent().sentence
    with pytest.raises(FedveilError, match="guards another model"):
        trainer(protect).fit(Module(), loader())


def test_what_was_spent_survives_a_checkpoint(tmp_path):
    module, protect = Module(), GuardCallback("clip")
    first = trainer(protect, enable_checkpointing=True, default_root_dir=tmp_path)
    first.fit(module, loader())
    first.save_checkpoint(tmp_path / "after.ckpt")
    again = GuardCallback("clip")
    trainer(again, max_epochs=2).fit(Module(), loader(), ckpt_path=tmp_path / "after.ckpt", weights_only=False)
    assert releases(again) == 12


def test_a_step_that_cannot_be_protected_is_not_taken():
    class Broken(Module):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * (torch.nan if index == 2 else 1)

    module, protect = Broken(), GuardCallback("clip")
    with pytest.raises(FedveilError, match="not finite"):
        trainer(protect).fit(module, loader())
    assert releases(protect) == 2
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_what_it_cannot_guard_is_refused():
    with pytest.raises(FedveilError, match="dp-sgd needs the data behind a gradient"):
        GuardCallback("dp-sgd")
    with pytest.raises(FedveilError, match="made when training begins"):
        _ = GuardCallback("clip").guard

    class Two(Module):
        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]

        automatic_optimization = False

    with pytest.raises(FedveilError, match="uses 2 optimizers"):
        trainer(GuardCallback("clip")).fit(Two(), loader())

    class Swapped(Module):
        def on_train_batch_start(self, batch, index):
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]

    module = Swapped()
    with pytest.raises(FedveilError, match="the new one is not guarded"):
        trainer(GuardCallback("clip")).fit(module, loader())
    torch.testing.assert_close(module.state_dict(), Module().state_dict(), rtol=0, atol=0)


def test_the_optimizer_is_as_it_was_after_training():
    module, protect = Module(), GuardCallback("clip")
    fitted = trainer(protect)
    fitted.fit(module, loader())
    assert not fitted.optimizers or not fitted.optimizers[0]._optimizer_step_pre_hooks
