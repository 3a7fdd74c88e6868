"""Which backend a module gets, why, and that it gets the same one again."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedveil.clients import choose
from fedveil.clients.choose import (
    choose_backend,
    counted_operations,
    evaluation_seconds,
    gradient_seconds,
    make_engine,
    why_not_stacked,
)
from fedveil.clients.engine import Engine
from fedveil.errors import FedveilError

SAMPLE = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
LINEAR = nn.Linear(6, 3)


class Branching(nn.Module):
    """Looks at values: `vmap` cannot run it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs):
        return self.layer(inputs) if inputs.sum().item() >= 0 else -self.layer(inputs)


def chosen(model=LINEAR, backend="auto", clients=4, steps=10, **given):
    return choose_backend(model, F.cross_entropy, backend=backend, clients=clients, sample=SAMPLE, steps=steps, **given)


def network(width=4):
    layers = [nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width * 64, 10))


def picked(batch, clients, *, one_copy=True, model=None, **given):
    sample = torch.zeros(batch, 1, 12, 12), torch.zeros(batch, dtype=torch.int64)
    model = model or network()
    given = {"steps": 1, **given}
    return choose_backend(model, F.cross_entropy, clients=clients, sample=sample, one_copy=one_copy, **given)


def test_a_module_that_cannot_be_stacked_runs_on_the_loop_and_says_why():
    choice = chosen(Branching(), clients=32)
    assert choice.backend == "loop"
    assert "cannot be stacked" in choice.why
    assert ".item()" in choice.why
    assert why_not_stacked(LINEAR, F.cross_entropy, SAMPLE) is None


@pytest.mark.parametrize("backend", ["stacked", "compiled"])
def test_a_forced_backend_that_cannot_run_is_refused(backend):
    with pytest.raises(FedveilError, match=f"cannot run on the backend '{backend}'.*use --backend loop"):
        chosen(Branching(), backend)


@pytest.mark.parametrize("backend", ["loop", "stacked", "compiled"])
def test_a_forced_backend_is_taken(backend):
    assert chosen(backend=backend) == choose.Choice(backend, "as asked")


def test_many_small_clients_are_stacked_and_few_large_batches_not():
    assert picked(1, 32).backend == "stacked"
    assert picked(64, 2) == choose.Choice("loop", picked(64, 2).why)
    assert "times as long" in picked(64, 2).why
    # Stacked convolutions with weights of each client's own are slow.
    both = [picked(8, 32, model=network(24), one_copy=one_copy).backend for one_copy in (True, False)]
    assert both == ["stacked", "loop"]


def test_long_work_is_compiled(monkeypatch):
    monkeypatch.setattr(choose, "compiler_found", lambda: True)
    once = chosen(steps=1, clients=32)
    assert once.backend == "stacked"
    assert chosen(steps=10**5, clients=32).backend == "compiled"
    assert "s of work" in chosen(steps=10**5, clients=32).why
    made = [
        make_engine(LINEAR, F.cross_entropy, clients=32, sample=SAMPLE, steps=1, **given).backend
        for given in ({"processes": 10**6}, {"beside": 1e3}, {})
    ]
    assert made == ["compiled", "compiled", "stacked"]
    monkeypatch.setattr(choose, "compiler_found", lambda: False)
    assert chosen(steps=10**5, clients=32).backend == "stacked"


def test_large_models_run_as_they_are(monkeypatch):
    monkeypatch.setattr(choose, "compiler_found", lambda: True)
    monkeypatch.setattr(choose, "LARGE", 10)
    assert chosen(steps=10**9, clients=32) == choose.Choice("loop", "a large model keeps the processor busy as it is")


@pytest.mark.parametrize("kept", [False, True], ids=["empty", "full"])
def test_the_choice_does_not_depend_on_what_is_kept(monkeypatch, kept):
    asked = []
    monkeypatch.setattr(choose, "compiler_found", lambda: True)
    monkeypatch.setattr(Engine, "keeps_gradient", lambda *_, **given: asked.append(given) or kept)
    seen = [chosen(steps=steps, clients=32).backend for steps in (1, 10**5)]
    assert seen == ["stacked", "compiled"]
    assert asked == [{}], "nothing is made to choose"


def test_the_engine_is_as_chosen_and_leaves_the_model_alone():
    model = nn.Linear(6, 3)
    before = model.weight.clone()
    engine = make_engine(model, F.cross_entropy, clients=40, sample=SAMPLE, steps=1)
    assert (engine.backend, engine.chunk) == ("stacked", 32)
    assert engine.model is not model
    assert torch.equal(model.weight, before)


def test_an_unknown_backend_is_refused():
    with pytest.raises(FedveilError, match="backend 'fast'"):
        make_engine(LINEAR, F.cross_entropy, backend="fast", clients=1, sample=SAMPLE, steps=1)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(72, 5)), (4, 3, 8, 8)),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    ],
    ids=["convolutions", "attention"],
)
def test_operations_are_counted_as_torch_counts_them(model, shape):
    inputs = torch.randn(shape)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(inputs)
    assert counted_operations(lambda: model(inputs)) == counter.get_total_flops() > 0


def test_counting_does_not_import_the_compiler():
    code = (
        "import sys, torch; from fedveil.clients.choose import counted_operations; "
        "counted_operations(lambda: torch.nn.Linear(3, 2)(torch.zeros(4, 3))); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_estimated_time_grows_with_the_arithmetic():
    small, large = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 2000), nn.Linear(2000, 2000))
    assert gradient_seconds(small, SAMPLE, 200) == pytest.approx(2 * gradient_seconds(small, SAMPLE, 100))
    assert gradient_seconds(large, SAMPLE, 100) > 2 * gradient_seconds(small, SAMPLE, 100)


def test_evaluation_is_estimated_from_a_few_examples():
    model, few = nn.Linear(200, 300), torch.zeros(4, 200)
    once = evaluation_seconds(model, few, 1000, 100)
    assert evaluation_seconds(model, few, 2000, 100) == pytest.approx(2 * once)
    assert evaluation_seconds(model, torch.zeros(8, 200), 1000, 100) == pytest.approx(once)
    assert once > 1000 * 2 * 200 * 300 / choose.EVALUATED.operations_per_second
