"""What the engine is compared with: a copy of the module per client and `loss.backward()`, nothing shared with it.

Also the models of these tests, and the hash behind the dropout masks written out in plain Python.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from fedveil.clients.engine import Engine
from fedveil.streams import Streams
from fedveil.tasks.inputs import map_inputs
from fedveil.tree import Tree

WORD = 2**64


# ---- the hash of the masks, by its published constants ------------------------------------------------


def finalize(word):
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % WORD
    return word ^ (word >> 31)


def plain_uniform(key, size):
    """The numbers behind a mask, one position after another."""
    start = finalize(key % WORD)
    return [(finalize(start ^ i) >> 40) / 2**24 for i in range(size)]


def plain_example_key(key, place):
    return finalize((key % WORD) ^ (((place + 1) * 0x9E3779B97F4A7C15) % WORD))


class MaskedDropout(nn.Module):
    """Dropout with the masks of one client, written out; `axes` trailing axes share an entry of the mask."""

    def __init__(self, p, axes, key):
        super().__init__()
        self.p, self.axes, self.key = p, axes, key

    def forward(self, inputs):
        if not self.training:
            return inputs
        shape = inputs.shape[: inputs.dim() - self.axes]
        uniform = torch.tensor(plain_uniform(self.key, shape.numel()), dtype=torch.float64).reshape(shape)
        self.key += 1
        mask = (uniform < 1 - self.p).reshape(*shape, *[1] * self.axes)
        return torch.where(mask, inputs / (1 - self.p), torch.zeros_like(inputs))


AXES = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def client_model(case, k, place=None):
    """A copy of the model with client k's weights, buffers and dropout masks."""
    model = copy.deepcopy(case.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in case.params:
                parameter.copy_(case.params[name][k])
        for name, buffer in model.named_buffers():
            buffer.copy_(case.buffers[name][k])
    swapped = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in AXES:
            if module not in swapped:
                key = int(case.streams().fold(f"{name}.key").key64()[k])
                key = key if place is None else plain_example_key(key, place)
                swapped[module] = MaskedDropout(module.p, AXES[type(module)], key).train(module.training)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, swapped[module])
    return model


def call(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def plain_gradients(case, inputs=None):
    """Gradients, buffers, losses and input gradients of every client, one plain backward pass each."""
    updates, buffers, losses, leaves = [], [], [], []
    for k in range(case.clients):
        model = client_model(case, k)
        own = map_inputs(lambda t, k=k: t[k].clone(), case.inputs if inputs is None else inputs)
        leaf = own if case.perturb is None else own[case.perturb]
        leaf.requires_grad_()
        loss = case.loss(call(model, own), case.targets[k])
        loss.backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        updates.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()})
        buffers.append(dict(model.named_buffers()))
        losses.append(loss.detach())
        leaves.append(leaf.grad)
    return Tree.stack(updates), Tree.stack(buffers), torch.stack(losses), torch.stack(leaves)


def plain_example_gradients(case):
    """The gradient of every example of every client, one backward pass each."""
    clients = []
    for k in range(case.clients):
        rows = []
        for i in range(case.targets.shape[1]):
            model = client_model(case, k, place=i)
            own = map_inputs(lambda t, k=k, i=i: t[k, i : i + 1], case.inputs)
            case.loss(call(model, own), case.targets[k, i : i + 1]).backward()
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            rows.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()})
        clients.append(Tree.stack(rows))
    return Tree.stack(clients)


# ---- cases --------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A model and what K clients bring: weights of their own, buffers, inputs, targets, streams."""

    model: nn.Module
    params: Tree
    buffers: Tree
    inputs: object
    targets: torch.Tensor
    perturb: str | None = None
    loss: object = F.cross_entropy
    seed: int = 3
    clients: int = field(init=False)

    def __post_init__(self):
        self.clients = len(self.targets)

    def streams(self):
        return Streams.seeded(self.seed, range(self.clients), "test")

    def arguments(self):
        return self.params, self.buffers, self.inputs, self.targets, self.streams()

    def engine(self, backend, **options):
        return Engine(self.model, self.loss, backend=backend, perturb=self.perturb, **options)

    def rows(self, index):
        """The same case with some of its clients; their streams keep their numbers."""
        part = copy.copy(self)
        part.params, part.buffers = self.params.rows(index), self.buffers.rows(index)
        part.inputs, part.targets = map_inputs(lambda t: t[index], self.inputs), self.targets[index]
        part.clients = len(part.targets)
        part.streams = lambda: self.streams().rows(index)
        return part


def make_case(name, clients=3, batch=4, dtype=torch.float32, seed=0):
    """A model by name, with weights and buffers that differ from client to client."""
    torch.manual_seed(seed)
    model, shape, perturb = MODELS[name]()
    model = model.to(dtype)
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    params = Tree({n: p + 0.1 * torch.randn(clients, *p.shape, dtype=dtype) for n, p in trained.items()})
    buffers = Tree({n: vary(b, clients) for n, b in model.named_buffers()})
    if isinstance(shape, dict):
        inputs = {n: torch.randn(clients, batch, *s, dtype=dtype) for n, s in shape.items()}
    else:
        inputs = torch.randn(clients, batch, *shape, dtype=dtype)
    return Case(model, params, buffers, inputs, torch.randint(0, 3, (clients, batch)), perturb)


def vary(buffer, clients):
    steps = torch.arange(clients).reshape(-1, *[1] * buffer.dim())
    return (buffer + steps).to(buffer.dtype)


class TwiceUsedDropout(nn.Module):
    """One dropout layer, called twice in a pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.4)

    def forward(self, x):
        return self.second(self.drop(torch.tanh(self.first(self.drop(x)))))


class TwiceNamedDropout(nn.Module):
    """One dropout layer under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.here = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.4)
        self.inside = nn.Sequential(nn.Tanh(), self.here)

    def forward(self, x):
        return self.second(self.inside(self.first(self.here(x))))


class Tied(nn.Module):
    """Two layers with one weight, as language models tie their embeddings."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Unused(nn.Module):
    """A parameter that the output does not depend on."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


class Named(nn.Module):
    """Two named inputs; the image is the one to perturb."""

    def __init__(self):
        super().__init__()
        self.image, self.age = nn.Conv2d(1, 2, 3), nn.Linear(1, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, *, image, age):
        return self.head(torch.relu(self.image(image)).flatten(1) + self.age(age))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 7, num_layers=2, batch_first=True), nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Branching(nn.Module):
    """Which layer runs depends on the data, and how often on its size."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        layer = self.high if x.mean() > 0 else self.low
        for _ in range(1 + int(x.abs().max() > 2)):
            x = torch.tanh(layer(x))
        return self.head(x)


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.5, training=self.training))


def conv():
    return nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 3))


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch_norm():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    )


def averaging_batch_norm():
    """Without a momentum batch norm averages over all batches, and reads its counter as a number."""
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3))


def layer_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2, inplace=True), nn.Linear(8, 3))


def dropout2d():
    return nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(54, 3))


def dropout_in_eval():
    model = dropout()
    model[1].eval()
    return model


def dropout_alone_in_training():
    """Monte Carlo dropout: the model is in eval mode but for its dropout."""
    model = dropout().eval()
    model[1].train()
    return model


def everything():
    """Small enough to compile in seconds, with all that could go wrong there: buffers, counters, keys."""
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


MODELS = {
    "conv": lambda: (conv(), (1, 8, 8), None),
    "mlp": lambda: (mlp(), (6,), None),
    "batch norm": lambda: (batch_norm(), (1, 8, 8), None),
    "batch norm in eval": lambda: (batch_norm().eval(), (1, 8, 8), None),
    "layer norm": lambda: (layer_norm(), (6,), None),
    "dropout": lambda: (dropout(), (6,), None),
    "dropout2d": lambda: (dropout2d(), (1, 8, 8), None),
    "dropout in eval": lambda: (dropout_in_eval(), (6,), None),
    "dropout alone in training": lambda: (dropout_alone_in_training(), (6,), None),
    "dropout used twice": lambda: (TwiceUsedDropout(), (6,), None),
    "dropout named twice": lambda: (TwiceNamedDropout(), (6,), None),
    "tied": lambda: (Tied(), (6,), None),
    "unused": lambda: (Unused(), (6,), None),
    "frozen": lambda: (frozen(), (6,), None),
    "named inputs": lambda: (Named(), {"image": (1, 4, 4), "age": (1,)}, "image"),
    "small of everything": lambda: (everything(), (6,), None),
    "averaging batch norm": lambda: (averaging_batch_norm(), (6,), None),
    "lstm": lambda: (Lstm(), (4, 5), None),
    "branching": lambda: (Branching(), (6,), None),
    "functional dropout": lambda: (FunctionalDropout(), (6,), None),
}
LOOP_ONLY = {"averaging batch norm", "lstm", "branching", "functional dropout"}
STACKABLE = [name for name in MODELS if name not in LOOP_ONLY]


def assert_trees_close(left, right, tolerance=1e-5):
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        torch.testing.assert_close(
            left[name], right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
