"""The callback for the `Trainer` of transformers, in a real one."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.errors import FedveilError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from fedveil.loops.huggingface import GuardCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """A classifier that gives its own loss, as the Trainer expects it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.spoil = 1.0

    def forward(self, x, labels):
        logits = self.net(x)
        self.seen = logits.dtype
        return {"loss": F.cross_entropy(logits.float(), labels) * self.spoil, "logits": logits}


def data(size=12):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(6, generator=generator), "labels": number % 3} for number in range(size)]


def trainer(tmp_path, model, *callbacks, **settings):
    settings = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "learning_rate": 0.1, **settings}
    settings = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", **settings}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    optimizer.register_step_post_hook(
        lambda *_: norms.append(math.hypot(*[p.grad.norm().item() for p in model.parameters()]))
    )
    made = transformers.Trainer(
        model, arguments, train_dataset=data(), callbacks=list(callbacks), optimizers=(optimizer, None)
    )
    return made, norms


def releases(callback):
    return sum(line["times"] for line in callback.guard.ledger.state_dict()["spent"])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("together", [1, 3])
def test_every_step_is_protected_once(tmp_path, half, together):
    model, protect = Model(), GuardCallback("clip:norm=0.01")
    made, norms = trainer(tmp_path, model, protect, bf16=half, gradient_accumulation_steps=together)
    made.train()
    assert model.seen == (torch.bfloat16 if half else torch.float32)
    assert len(norms) == 6 // together
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-4)
    assert releases(protect) == len(norms)


def test_the_trainers_own_optimizer_is_guarded(tmp_path):
    model, protect = Model(), GuardCallback("clip:norm=1+gaussian-noise:sigma=0.1")
    made, _ = trainer(tmp_path, model, protect)
    made.optimizer = None  # the Trainer makes its own
    made.train()
    assert releases(protect) == 6


def test_the_trainers_own_clipping_comes_before_the_defense(tmp_path):
    model = Model()
    made, norms = trainer(tmp_path, model, GuardCallback("gaussian-noise:sigma=0.5"), max_grad_norm=1e-6)
    made.train()
    assert min(norms) > 0.5 * math.sqrt(sum(parameter.numel() for parameter in model.parameters())) * 0.7


def test_no_defense_trains_as_the_trainer_does(tmp_path):
    guarded, plain = Model(), Model()
    trainer(tmp_path, guarded, GuardCallback("none"))[0].train()
    trainer(tmp_path, plain)[0].train()
    torch.testing.assert_close(guarded.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_what_was_spent_survives_a_checkpoint(tmp_path):
    trainer(tmp_path, Model(), GuardCallback("clip"), save_strategy="epoch")[0].train()
    again = GuardCallback("clip")
    made, _ = trainer(tmp_path, Model(), again, num_train_epochs=2)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert releases(again) == 12

    other, _ = trainer(tmp_path, Model(), GuardCallback("clip:norm=2"), num_train_epochs=2)
    with pytest.raises(FedveilError, match="belongs to the defense clip"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_a_checkpoint_that_does_not_tell_what_was_spent_is_refused(tmp_path):
    trainer(tmp_path, Model(), save_strategy="epoch")[0].train()
    made, _ = trainer(tmp_path, Model(), GuardCallback("clip"), num_train_epochs=2)
    with pytest.raises(FedveilError, match="written without this callback"):
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_a_step_that_cannot_be_protected_is_not_taken(tmp_path):
    model = Model()
    model.spoil = torch.nan
    made, norms = trainer(tmp_path, model, GuardCallback("clip"))
    with pytest.raises(FedveilError, match="not finite"):
        made.train()
    assert not norms
    torch.testing.assert_close(model.state_dict(), Model().state_dict(), rtol=0, atol=0)


def test_a_defense_that_needs_the_data_is_refused_at_once():
    with pytest.raises(FedveilError, match="fedem needs the data behind a gradient"):
        GuardCallback("fedem")
