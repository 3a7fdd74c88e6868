"""The compiled backend: one graph for any number of clients, equal to the loop, and it says when it cannot compile."""

import logging

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fedveil.clients import compiling
from fedveil.clients.engine import Engine
from fedveil.streams import Streams
from fedveil.tree import Tree

from .plain import assert_trees_close, make_case

CLIENTS = 12


@pytest.fixture(autouse=True)
def _not_kept(monkeypatch):
    """What `torch.compile` does where no package can be made."""
    monkeypatch.setattr("fedveil.clients.engine.packaged", lambda *_, **__: None)


@pytest.fixture(scope="module")
def compiled():
    """One engine for the whole file: compiling is what takes the time."""
    torch._dynamo.reset()
    counters.clear()
    compiling._compiler.clear()
    case = make_case("small of everything", clients=CLIENTS)
    case.params = Tree.expand(case.params.row(0), CLIENTS)
    case.buffers = Tree.expand(case.buffers.row(0), CLIENTS)  # as at the start of a round
    return case, case.engine("compiled", chunk=4)


def told(caplog):
    """What fedveil said, without the compiler's own log."""
    return [record.getMessage() for record in caplog.records if record.name == "fedveil"]


def assert_equals_loop(engine, case):
    found = engine.gradient(*case.arguments())
    expected = case.engine("loop").gradient(*case.arguments())
    assert_trees_close(found.update, expected.update)
    assert_trees_close(found.buffers, expected.buffers)
    torch.testing.assert_close(found.loss, expected.loss)


@pytest.mark.compiles
def test_any_number_of_clients_is_one_graph_and_equals_the_loop(compiled, caplog):
    case, engine = compiled
    for clients in (5, *range(CLIENTS, 0, -1)):
        assert_equals_loop(engine, case.rows(slice(clients)))
    part = case.rows(slice(4))
    part.inputs = part.inputs.transpose(0, 1).contiguous().transpose(0, 1)  # other strides
    assert_equals_loop(engine, part)
    assert counters["stats"]["unique_graphs"] == 1
    assert not told(caplog)


@pytest.mark.compiles
def test_a_ragged_batch_runs_stacked(compiled, caplog):
    case, engine = compiled
    engine.gradient(*case.arguments())
    graphs = counters["stats"]["unique_graphs"]
    ragged = case.rows(slice(5))
    ragged.inputs, ragged.targets = ragged.inputs[:, :3], ragged.targets[:, :3]
    assert_equals_loop(engine, ragged)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not told(caplog)


@pytest.mark.compiles
def test_a_model_that_changes_is_compiled_anew():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.ELU(), nn.Linear(4, 3))
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, 3)
    inputs, targets, streams = torch.randn(3, 4, 6), torch.randint(0, 3, (3, 4)), Streams.seeded(0, range(3))
    engines = [Engine(model, F.cross_entropy, backend=backend) for backend in ("loop", "compiled")]
    seen = []
    for change in (lambda model: None, lambda model: model.eval(), lambda model: setattr(model[2], "alpha", 0.1)):
        for engine in engines:
            change(engine.model)
        expected, found = (engine.gradient(params, Tree({}), inputs, targets, streams).update for engine in engines)
        assert_trees_close(found, expected)
        seen.append(found["0.weight"])
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])


@pytest.mark.compiles
def test_a_model_that_cannot_be_compiled_is_told_in_one_line_and_runs_on(caplog):
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.layer(x)

    torch.manual_seed(0)
    model = Stubborn()
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, 3)
    inputs, targets = torch.randn(3, 4, 6), torch.randint(0, 3, (3, 4))
    results = []
    with caplog.at_level(logging.WARNING, logger="fedveil"):
        engine = Engine(model, F.cross_entropy, backend="compiled", chunk=2)
        for each in (engine, engine, Engine(model, F.cross_entropy, backend="loop")):
            results.append(each.gradient(params, Tree({}), inputs, targets, Streams.seeded(0, range(3))).update)
    assert_trees_close(results[0], results[2])
    assert_trees_close(results[1], results[2])
    (message,) = told(caplog)
    assert message.startswith("gradient runs uncompiled: ")
    assert "\n" not in message


def test_without_a_compiler_it_says_so_once_and_runs_on(monkeypatch, caplog):
    def missing(*_):
        raise RuntimeError("No working C++ compiler found\nand much more")

    monkeypatch.setattr(compiling, "which", lambda _: None)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    monkeypatch.setattr(compiling, "_compiler", [])
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled without a compiler"))
    case = make_case("small of everything")
    with caplog.at_level(logging.WARNING, logger="fedveil"):
        for _ in range(2):
            assert_equals_loop(case.engine("compiled", chunk=2), case)
    (message,) = told(caplog)
    assert "no C++ compiler was found (No working C++ compiler found)" in message
    assert "\n" not in message


def test_another_run_compiles_for_its_own_first_batch_and_nothing_twice(monkeypatch):
    made, ran = [], []

    def compile_once(function, name):
        made.append(name)
        return lambda *arguments: ran.append(arguments[4].shape) or function(*arguments)

    monkeypatch.setattr("fedveil.clients.engine.compile_once", compile_once)
    monkeypatch.setattr("fedveil.clients.engine.compiler_found", lambda: True)
    case = make_case("small of everything", clients=4)
    few = case.rows(slice(4))
    few.inputs, few.targets = few.inputs[:, :3], few.targets[:, :3]
    first = case.engine("compiled", chunk=2)
    for each in (case, few, case):
        assert_equals_loop(first, each)
    assert (made, ran) == (
        ["gradient"],
        [case.targets[:2].shape] * 4,
    )  # twice two chunks; the few ran stacked
    other = first.again()
    for each in (few, case):  # this run begins with few examples
        assert_equals_loop(other, each)
    assert (made[1:], ran[4:]) == (["gradient"], [few.targets[:2].shape] * 2)
    assert_equals_loop(first.again(), case)
    assert_equals_loop(first.again(chunk=4), case)  # another number of clients is another graph
    assert (made[2:], ran[6:]) == (["gradient"], [case.targets[:2].shape] * 2 + [case.targets.shape])
    assert_equals_loop(first.uncompiled(), case)
    assert len(ran) == 9
    assert (first.backend, first.uncompiled().backend, first.again("loop").uncompiled().backend) == (
        *("compiled", "stacked", "loop"),
    )


def test_the_loss_in_evaluation_mode_is_compiled_for_batches_of_its_own(monkeypatch):
    ran = []
    monkeypatch.setattr(
        "fedveil.clients.engine.compile_once",
        lambda function, name: lambda *arguments: ran.append(len(arguments[4][0])) or function(*arguments),
    )
    monkeypatch.setattr("fedveil.clients.engine.compiler_found", lambda: True)
    case = make_case("small of everything", clients=2)
    few = case.rows(slice(2))
    few.inputs, few.targets = few.inputs[:, :3], few.targets[:, :3]
    engine = case.engine("compiled", chunk=2)
    for _ in range(2):
        engine.loss(*case.arguments())
        engine.evaluation_loss(*few.arguments())
    assert ran == [case.targets.shape[1], 3] * 2
