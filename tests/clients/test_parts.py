"""The parts of a module, and the gradient of a module as it stands."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.clients.engine import Engine
from fedveil.clients.passes import Parts
from fedveil.streams import Streams
from fedveil.tree import Tree


class Odd(nn.Module):
    """A layer under two names, tied weights, a buffer, an empty place, and a frozen parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.again = self.first[0]
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first[0].weight
        self.nothing = None
        self.register_module("empty", None)
        self.shift = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.again(self.first(inputs)) + self.shift)


def test_parts_are_those_that_torch_names():
    model = Odd()
    parts = Parts.of(model)
    assert list(parts.modules.items()) == list(model.named_modules())
    assert [name for name, _ in model.named_parameters()] == list(parts.parameters)
    assert all(parts.parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(parts.buffers[name] is buffer for name, buffer in model.named_buffers())
    assert list(parts.buffers) == [name for name, _ in model.named_buffers()]
    assert list(parts.weights) == [name for name in parts.parameters if name != "shift"]


def test_a_look_sees_what_was_frozen_since():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    engine = Engine(model, functional.cross_entropy, backend="loop", own=True)
    model[0].requires_grad_(False)
    assert list(engine.look().weights) == ["1.weight", "1.bias"]


class Sometimes(nn.Module):
    """Draws in every second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        return self.layer(inputs) * (torch.rand(3) if self.passes % 2 == 0 else 1.0)


def _at(engine: Engine, inputs: Tensor, targets: Tensor) -> Tree:
    weights = Tree.expand(engine.parts.weights, 1)
    return engine.gradient(weights, Tree({}), inputs[None], targets[None], Streams.seeded(0, [0])).update


def test_the_gradient_at_home_is_left_to_the_watch_until_draws_are_ruled_out():
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    still = Engine(nn.Linear(4, 3), functional.cross_entropy, backend="loop", own=True)
    assert still.gradient_at_home(inputs, targets) is None
    watched = _at(still, inputs, targets)
    found = still.gradient_at_home(inputs, targets)
    assert found is not None
    for name, gradient in watched.items():
        assert torch.equal(found.update[name], gradient)


def test_a_model_that_draws_after_all_is_left_to_the_watch():
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    engine = Engine(Sometimes(), functional.cross_entropy, backend="loop", own=True)
    _at(engine, inputs, targets)  # the first pass draws nothing
    assert engine.gradient_at_home(inputs, targets) is None
    assert engine.gradient_at_home(inputs, targets) is not None


def test_dropout_and_buffers_are_no_matter_of_a_plain_pass():
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    for layer in (nn.Dropout(0.5), nn.BatchNorm1d(4)):
        engine = Engine(nn.Sequential(layer, nn.Linear(4, 3)), functional.cross_entropy, backend="loop", own=True)
        for _ in range(2):
            buffers = Tree.expand(engine.parts.buffers, 1)
            params = Tree.expand(engine.parts.weights, 1)
            engine.gradient(params, buffers, inputs[None], targets[None], Streams.seeded(0, [0]))
        assert engine.gradient_at_home(inputs, targets) is None
