"""Lengths of Jacobian rows of networks of convolutions, against a backward pass for each row."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.clients import engine as engines
from fedveil.clients import local_jacobian
from fedveil.clients.engine import Engine
from fedveil.clients.graph import NotUnderstood
from fedveil.clients.local_jacobian import row_lengths
from fedveil.streams import Streams
from fedveil.tree import Tree

BODIES = {
    "as lenet": lambda: [
        nn.Conv2d(1, 3, 5, padding=2, stride=2),
        nn.Sigmoid(),
        nn.Conv2d(3, 4, 5, padding=2, stride=2),
        nn.Sigmoid(),
        nn.Conv2d(4, 3, 5, padding=2),
        nn.Sigmoid(),
    ],
    "uneven windows": lambda: [
        nn.Conv2d(1, 4, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1)),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, (2, 3), groups=2, bias=False),
        nn.Tanh(),
        nn.GELU(),
    ],
    "columns that nothing sees": lambda: [nn.Conv2d(1, 2, 2, stride=5), nn.Tanh(), nn.Conv2d(2, 2, 1)],
    "no operation between": lambda: [nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3)],
    "an operation in front": lambda: [nn.Tanh(), nn.Conv2d(1, 2, 3), nn.SiLU()],
}
OTHERS = {
    "pooling": lambda: [nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)],
    "norm": lambda: [nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)],
    "a linear layer": lambda: [nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LazyLinear(30)],
    "no convolution": lambda: [nn.Tanh()],
    "turned pictures": lambda: [nn.Conv2d(1, 1, 3), Turned()],
}


class Turned(nn.Module):
    def forward(self, pictures):
        return pictures.transpose(2, 3)


def made(layers, dtype=torch.float64, size=3):
    torch.manual_seed(0)
    body = nn.Sequential(*layers, nn.Flatten())
    inputs = torch.randn(size, 1, 13, 17)
    body(inputs)
    return body.to(dtype), inputs.to(dtype).requires_grad_()


def by_passes(features, inputs):
    rows = [torch.autograd.grad(f.sum(), inputs, retain_graph=True)[0].flatten(1).norm(dim=1) for f in features.T]
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("most", [2**25, 1])
@pytest.mark.parametrize("columns", [9, 4, 100])
@pytest.mark.parametrize("name", BODIES)
def test_lengths_are_those_of_single_passes(name, columns, most, monkeypatch):
    monkeypatch.setattr(local_jacobian, "COLUMNS", columns)
    body, inputs = made(BODIES[name]())
    features = body(inputs)
    if most == 1:  # one example at a time
        real = local_jacobian._check_worth
        monkeypatch.setattr(local_jacobian, "_check_worth", lambda *given: real(*given) * 0 + 2**25)
    found = row_lengths(features, inputs, 10**9)
    torch.testing.assert_close(found, by_passes(features, inputs), rtol=1e-10, atol=1e-12)
    assert not found.requires_grad


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_not_understood(name):
    body, inputs = made(OTHERS[name]())
    with pytest.raises(NotUnderstood):
        row_lengths(body(inputs), inputs, 10**9)


def test_a_few_features_are_not_worth_it():
    body, inputs = made(BODIES["as lenet"]())
    with pytest.raises(NotUnderstood):
        row_lengths(body(inputs), inputs, 1)


@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize("name", ["as lenet", "pooling"])
def test_the_engine_gives_the_same_for_any_network(name, backend, monkeypatch):
    body, inputs = made((BODIES | OTHERS)[name]())
    width = body(inputs).shape[1]
    model = nn.Sequential(*body, nn.Linear(width, 4)).double()
    layer = str(len(body))
    engine = Engine(model, F.cross_entropy, backend=backend)
    params = Tree.expand({name: p.detach() for name, p in model.named_parameters()}, 2)
    chosen = torch.stack([torch.randperm(width), torch.arange(width)])
    pictures = torch.stack([inputs.detach(), inputs.detach().flip(0)])
    if name == "as lenet":  # no single pass is made
        monkeypatch.setattr(engines, "Sensitivity", None)
    features, lengths = engine.sensitivity(layer, chosen, params, Tree({}), pictures, Streams.seeded(0, [0, 1]))
    for k in range(2):
        value = pictures[k].clone().requires_grad_()
        truth = body(value)
        torch.testing.assert_close(features[k], truth[:, chosen[k]].detach())
        torch.testing.assert_close(lengths[k], by_passes(truth, value)[:, chosen[k]])
