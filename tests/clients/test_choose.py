"""Which backend a module gets, why, and that it gets the same one again."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedveil.clients import choose
from fedveil.clients.choose import choose_backend, counted_operations, gradient_seconds, make_engine, why_not_stacked
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


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))
    return tmp_path / "calibration.json"


def chosen(model=LINEAR, backend="auto", clients=4, steps=10, **given):
    return choose_backend(model, F.cross_entropy, backend=backend, clients=clients, sample=SAMPLE, steps=steps, **given)


def timed(monkeypatch, loop, stacked):
    """Steps that take so long."""
    taken = []

    def step(engine, clients, sample, one_copy=True):
        taken.append((engine.backend, clients, one_copy))
        return {"loop": loop, "stacked": stacked}[engine.backend]

    monkeypatch.setattr(choose, "_one_step", step)
    return taken


def test_a_module_that_cannot_be_stacked_runs_on_the_loop_and_says_why():
    choice = chosen(Branching())
    assert choice.backend == "loop"
    assert "cannot be stacked" in choice.why
    assert ".item()" in choice.why
    assert why_not_stacked(LINEAR, F.cross_entropy, SAMPLE) is None


@pytest.mark.parametrize("backend", ["stacked", "compiled"])
def test_a_forced_backend_that_cannot_run_is_refused(backend):
    with pytest.raises(FedveilError, match=f"cannot run on the backend '{backend}'.*use --backend loop"):
        chosen(Branching(), backend)


@pytest.mark.parametrize("backend", ["loop", "stacked", "compiled"])
def test_a_forced_backend_is_taken_without_measuring(backend, own_cache):
    assert chosen(backend=backend) == choose.Choice(backend, "as asked")
    assert not own_cache.exists()


def test_the_faster_one_is_chosen(monkeypatch):
    timed(monkeypatch, loop=1e-3, stacked=3e-3)
    assert chosen() == choose.Choice("loop", "stacking takes 3.00 times as long")


def test_or_the_other(monkeypatch):
    timed(monkeypatch, loop=3e-3, stacked=1e-3)
    assert chosen() == choose.Choice("stacked", "3.0 times as fast as the loop")


def test_long_work_is_compiled(monkeypatch):
    timed(monkeypatch, loop=0.2, stacked=0.1)
    monkeypatch.setattr(choose, "compiler_found", lambda: True)
    assert chosen(steps=1000).backend == "stacked"  # saves 50 s, compiling takes 30
    assert chosen(steps=2000).backend == "compiled"
    assert chosen(steps=100, clients=32 * 20).backend == "compiled"  # every step is twenty chunks
    monkeypatch.setattr(choose, "compiler_found", lambda: False)
    assert chosen(steps=2000).backend == "stacked"


def test_what_was_measured_is_kept_for_the_next_time(monkeypatch, own_cache):
    taken = timed(monkeypatch, loop=1e-3, stacked=3e-3)
    chosen()
    measured = len(taken)
    assert chosen().backend == "loop"
    assert len(taken) == measured + 1  # but for the one step that shows whether the model can be stacked
    assert list(json.loads(own_cache.read_text()).values()) == [{"loop": 1e-3, "stacked": 3e-3}]
    chosen(one_copy=False)  # weights of each client's own are another case
    assert (own_cache.exists(), len(json.loads(own_cache.read_text()))) == (True, 2)
    assert ("loop", 4, False) in taken


def test_times_that_cannot_be_are_left_out(own_cache):
    times = {
        "zero": {"loop": 0, "stacked": 1},
        "endless": {"loop": 1e999, "stacked": 1},
        "good": {"loop": 1, "stacked": 2},
    }
    own_cache.write_text(json.dumps(times))
    assert choose._read(own_cache) == {"good": {"loop": 1.0, "stacked": 2.0}}


@pytest.mark.parametrize("damaged", ["[" * 100_000, "", "[]", '{"a": 1}', '{"a": {"loop": "x", "stacked": 1}}', "\x00"])
def test_a_damaged_cache_counts_as_none(monkeypatch, own_cache, damaged):
    own_cache.write_text(damaged)
    timed(monkeypatch, loop=1e-3, stacked=3e-3)
    assert chosen().backend == "loop"
    assert len(json.loads(own_cache.read_text())) == 1


def test_the_engine_is_as_chosen_and_leaves_the_model_alone(monkeypatch):
    timed(monkeypatch, loop=1e-3, stacked=3e-3)
    model = nn.Linear(6, 3)
    before = model.weight.clone()
    engine = make_engine(model, F.cross_entropy, clients=40, sample=SAMPLE, steps=1)
    assert (engine.backend, engine.chunk) == ("loop", 32)
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
