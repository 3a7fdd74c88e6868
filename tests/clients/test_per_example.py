"""Clipped sums from one pass of a batch, against a plain loop over examples; and where they must not be used."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.clients import per_example, shares
from fedveil.clients.engine import Engine
from fedveil.streams import Streams
from fedveil.tree import Tree

SIZE, CLASSES = 6, 4


class Tied(nn.Module):
    """A table of words that is also the last layer, and a position that is added."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 5, padding_idx=2)
        self.places = nn.Parameter(torch.randn(1, 3, 5))
        self.mix = nn.Linear(5, 5, bias=False)

    def forward(self, words):
        inside = self.mix(self.words(words) + self.places)
        return F.linear(inside.mean(1), self.words.weight)[:, :CLASSES]


class Transformer(nn.Module):
    """A token in front, a layer with attention, and a head; with the batch as the second axis inside if asked for."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.words = nn.Embedding(9, 8)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words):
        inside = torch.cat([self.first.expand(len(words), -1, -1), self.words(words)], dim=1)
        inside = self.layer(inside) if self.batch_first else self.layer(inside.transpose(0, 1)).transpose(0, 1)
        return self.head(inside[:, 0])


class Frames(nn.Module):
    """The same convolution for every frame of a film, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.look = nn.Conv2d(1, 2, 3)
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, film):
        size, frames = film.shape[:2]
        seen = self.look(film.flatten(0, 1)[:, None]).flatten(1).unflatten(0, (size, frames)).sum(1)
        return self.head(self.again(torch.tanh(self.again(seen))))


class Scaled(nn.Module):
    """Something that is done to all inputs before a linear layer."""

    def __init__(self, function, width=5):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs):
        return self.head(self.function(inputs, self.scale))


class Recurrent(nn.Module):
    """A cell that is used for one word after another."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(5, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, inputs):
        return self.head(self.cell(inputs)[0][:, -1])


def pictures(*shape):
    return lambda: torch.randn(SIZE, *shape)


def words():
    return torch.tensor([[0, 1, 1], [2, 3, 0], [2, 2, 2], [4, 5, 4], [8, 7, 6], [1, 1, 1]])


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, (3, 2), groups=2, dilation=(1, 2), bias=False),
        nn.GroupNorm(3, 6),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )


# Models whose graphs are read, and their inputs.
READ = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES, bias=False)), pictures(5)),
    "convolutions": (convolutions, pictures(2, 9, 8)),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=2, stride=2), nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)),
        pictures(2, 7),
    ),
    "rows": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm((3, 6)), nn.GELU(), nn.Flatten(), nn.LazyLinear(CLASSES)),
        pictures(3, 5),
    ),
    "scaled rows": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6), nn.Flatten(), nn.LazyLinear(CLASSES)),
        pictures(3, 5),
    ),
    "groups of flat channels": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.Linear(6, CLASSES)),
        pictures(5),
    ),
    "attention": (lambda: Transformer(batch_first=True), words),
    "attention, batch second": (lambda: Transformer(batch_first=False), words),
    "tied": (Tied, words),
    "recurrent": (Recurrent, pictures(3, 5)),
    "frames": (Frames, pictures(3, 4, 4)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Tanh(), nn.Linear(40, CLASSES)),
        pictures(5),
    ),
}
# Models whose graphs are not, or must not be, with one reason each.
NOT_READ = {
    "an unknown use": (lambda: Scaled(lambda x, scale: x * torch.exp(scale)), pictures(5)),
    "no sum over rows": (lambda: Scaled(lambda x, scale: x @ torch.diag(scale)), pictures(5)),
    "multiplied inside": (lambda: Scaled(lambda x, scale: (x * scale[:, None]).sum(2)), pictures(5, 3)),
    "repeated inside": (lambda: Scaled(lambda x, scale: (x + scale[:, None]).sum(2)), pictures(5, 3)),
    "examples are mixed": (lambda: Scaled(lambda x, scale: x + scale - (x * x.mean(0)).sum()), pictures(5)),
    "mixed on the way back": (lambda: Scaled(lambda x, scale: (x + scale).softmax(0)), pictures(5)),
    "half precision": (lambda: nn.Linear(5, CLASSES).to(torch.bfloat16), lambda: torch.randn(SIZE, 5).bfloat16()),
}


def made(case, dtype=torch.float64):
    """A model, and a batch."""
    torch.manual_seed(0)
    make, batch = case
    model, inputs = make(), batch()
    model(inputs)
    model = model if dtype is None else model.to(dtype)
    if inputs.is_floating_point() and dtype is not None:
        inputs = inputs.to(dtype)
    return model, inputs, torch.arange(len(inputs)) % CLASSES


def found(engine, inputs, targets, bound, seed=0):
    """What the engine comes to for one client."""
    weights = {name: p.detach() for name, p in engine.model.named_parameters()}
    total, loss = engine.clipped_sum(
        bound, Tree.expand(weights, 1), Tree({}), inputs[None], targets[None], Streams.seeded(seed, [0])
    )
    return total.row(0), loss[0]


def expected(engine, inputs, targets, bound, loss=F.cross_entropy, seed=0):
    """The same by the engine's single backward passes, of which `tests/clients/test_backends.py` tells."""
    weights = {name: p.detach() for name, p in engine.model.named_parameters()}
    streams = Streams.seeded(seed, [0])
    each = engine.example_gradients(Tree.expand(weights, 1), Tree({}), inputs[None], targets[None], streams).row(0)
    lengths = torch.sqrt(sum(g.double().flatten(1).square().sum(1) for g in each.values()))
    factors = (bound / lengths).clamp_max(1.0)
    return {n: torch.einsum("b,b...->...", factors.to(g.dtype), g) for n, g in each.items()}, lengths


def bound_for(lengths):
    """One that some examples are clipped by, and others not."""
    return float(lengths.median()) * 1.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("way", ["by itself", "inner products", "in parts"])
@pytest.mark.parametrize("name", READ)
def test_the_sum_is_that_of_single_backward_passes(name, way, dtype, monkeypatch):
    if way == "inner products":
        monkeypatch.setattr(shares, "CHEAPER", 1e9)
    if way == "in parts":
        monkeypatch.setattr(shares, "CHEAPER", 0)
        monkeypatch.setattr(shares, "MOST_KEPT", 20)
        monkeypatch.setattr(shares, "FEW_ENTRIES", 0)
    model, inputs, targets = made(READ[name], dtype)
    engine = Engine(model, F.cross_entropy, backend="loop")
    bound = bound_for(expected(engine, inputs, targets, 1.0)[1])
    close = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for size in (SIZE, SIZE - 1, 2):
        total, loss = found(engine, inputs[:size], targets[:size], bound, seed=size)
        truth, _ = expected(engine, inputs[:size], targets[:size], bound, seed=size)
        torch.testing.assert_close(total, truth, **close)
        assert all(not tensor.requires_grad for tensor in total.values())
        assert loss.shape == ()
    assert list(engine.graphs.values()) != []
    assert None not in engine.graphs.values()


@pytest.mark.parametrize("name", READ)
def test_once_known_no_single_pass_is_made(name, monkeypatch):
    model, inputs, targets = made(READ[name])
    engine = Engine(model, F.cross_entropy, backend="loop")
    found(engine, inputs, targets, 1.0)
    monkeypatch.setattr(per_example, "one_by_one", None)
    found(engine, inputs, targets, 1.0)


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_understood_goes_one_by_one(name):
    model, inputs, targets = made(NOT_READ[name], None if name == "half precision" else torch.float64)
    engine = Engine(model, F.cross_entropy, backend="loop")
    for _ in range(2):
        total, _ = found(engine, inputs, targets, 0.3)
        truth, _ = expected(engine, inputs, targets, 0.3)
        half = name == "half precision"
        torch.testing.assert_close(total, truth, rtol=3e-2 if half else 1e-9, atol=3e-3 if half else 1e-11)
    assert set(engine.graphs.values()) <= {None}


def test_a_new_graph_is_proven_again():
    """Here examples are mixed only once a switch is turned: what was proven before does not count for that."""
    model = Scaled(lambda x, scale: x + scale if not model.mixed else x + scale - (x * x.mean(0)).sum())
    model.mixed = False
    engine = Engine(model.double(), F.cross_entropy, backend="loop")
    engine.model.mixed = False
    torch.manual_seed(1)
    inputs, targets = torch.randn(SIZE, 5, dtype=torch.float64), torch.arange(SIZE) % CLASSES
    for mixed in (False, True, False):
        model.mixed = mixed
        total, _ = found(engine, inputs, targets, 0.3)
        torch.testing.assert_close(total, expected(engine, inputs, targets, 0.3)[0])
    assert len(engine.graphs) == 2
    assert None in engine.graphs.values()


def test_a_loss_with_weights_is_that_of_every_example_alone():
    """The mean over a batch divides by the sum of its weights, and leaves out what is to be ignored."""
    weight = torch.tensor([1.0, 5.0, 0.1, 2.0], dtype=torch.float64)

    def loss(output, targets):
        return F.cross_entropy(output, targets, weight=weight, label_smoothing=0.1)

    model, inputs, targets = made(READ["linear"])
    engine = Engine(model, loss, backend="loop")
    total, value = found(engine, inputs, targets, 0.4)
    torch.testing.assert_close(total, expected(engine, inputs, targets, 0.4)[0])
    alone = [loss(model(inputs[i : i + 1]), targets[i : i + 1]) for i in range(SIZE)]
    torch.testing.assert_close(value, torch.stack(alone).mean().detach())
    assert None not in engine.graphs.values()


def test_a_loss_that_vmap_does_not_serve_is_called_for_every_example():
    def loss(output, targets):
        return F.cross_entropy(output, targets) * (2.0 if float(targets[0]) > 1 else 1.0)

    model, inputs, targets = made(READ["linear"])
    engine = Engine(model, loss, backend="loop")
    torch.testing.assert_close(found(engine, inputs, targets, 0.4)[0], expected(engine, inputs, targets, 0.4)[0])
    assert None not in engine.graphs.values()
    assert engine.graphs


def test_a_hook_on_a_parameter_counts():
    model, inputs, targets = made(READ["linear"])
    engine = Engine(model, F.cross_entropy, backend="loop", own=True)
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    engine.look()
    total, _ = found(engine, inputs, targets, 0.4)
    torch.testing.assert_close(total, expected(engine, inputs, targets, 0.4)[0])
    assert not engine.graphs


def test_a_gradient_that_is_not_finite_stays_so():
    model, inputs, targets = made(READ["linear"])
    engine = Engine(model, F.cross_entropy, backend="loop")
    found(engine, inputs, targets, 0.4)
    inputs[2] = torch.inf
    total, _ = found(engine, inputs, targets, 0.4)
    assert not torch.isfinite(total["0.weight"]).all()


def test_no_example_adds_more_than_the_bound():
    """In single precision, with examples whose lengths are far apart."""
    model, inputs, targets = made(READ["convolutions"], torch.float32)
    engine = Engine(model, F.cross_entropy, backend="loop")
    inputs = inputs * torch.logspace(-2, 3, SIZE)[:, None, None, None]
    found(engine, inputs, targets, 1.0)
    reading = per_example._together
    seen = []

    def noting(passes, client):
        together = reading(passes, client)
        plain = per_example.one_by_one(passes, client, 1.0)[2]
        seen.append((together.lengths() * (1 + per_example.ROUNDING[torch.float32]), plain))
        return together

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(per_example, "_together", noting)
        found(engine, inputs, targets, 1.0)
    taken, plain = seen[0]
    assert (taken >= plain * (1 - 1e-6)).all()


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_autocast_and_a_scaled_loss(scale):
    model, inputs, targets = made(READ["convolutions"], torch.float32)
    engine = Engine(model, F.cross_entropy, backend="loop")
    truth, lengths = expected(engine, inputs, targets, 0.5)
    engine.precision = lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    engine.loss_scale = scale
    for _ in range(2):
        total, _ = found(engine, inputs, targets, 0.5)
        apart = torch.sqrt(sum((total[n] - truth[n]).square().sum() for n in truth))
        assert apart < 0.05 * lengths.clamp_max(0.5).sum()
        assert all(tensor.dtype == torch.float32 for tensor in total.values())
    assert None not in engine.graphs.values()
    assert engine.graphs
