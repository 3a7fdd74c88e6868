"""`inspect_model`: silent on honest models over rounds of training, and naming what malicious servers send."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import fedveil as fv
from fedveil.errors import FedveilError
from fedveil.registry import models
from fedveil.vetting.received import inspect_model
from fedveil.vetting.rows import MOST_ROWS


def digits(side):
    data = load_digits()
    pictures = torch.as_tensor(data.images[:, None] / 16, dtype=torch.float32)
    return F.interpolate(pictures, size=(side, side), mode="bilinear"), torch.as_tensor(data.target)


class SmallTransformer(nn.Module):
    """Rows of a picture as tokens."""

    def __init__(self, side=8, width=32):
        super().__init__()
        self.embed = nn.Linear(side, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x.flatten(1, 2))).mean(1))


def honest_rounds(model, rounds, *, side, lr=0.05, steps=4, size=16, clients=2, momentum=0.0):
    """The models that an honest server of FedAvg sends, the first included."""
    pictures, labels = digits(side)
    generator = torch.Generator().manual_seed(0)
    yield copy.deepcopy(model.state_dict())
    for _ in range(rounds):
        sent = []
        for _ in range(clients):
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum)
            for _ in range(steps):
                batch = torch.randint(len(labels), (size,), generator=generator)
                optimizer.zero_grad()
                F.cross_entropy(local(pictures[batch]), labels[batch]).backward()
                optimizer.step()
            sent.append(local.state_dict())
        mean = {
            name: torch.stack([state[name].float() for state in sent]).mean(0).to(tensor.dtype)
            for name, tensor in sent[0].items()
        }
        model.load_state_dict(mean)
        yield copy.deepcopy(model.state_dict())


def built(name, side):
    torch.manual_seed(1)
    return SmallTransformer(side) if name == "transformer" else models.parse(name).build((1, side, side), 10)


@pytest.mark.parametrize(
    "name, side", [("lenet", 16), ("lenet5", 28), ("mlp", 8), ("convnet", 16), ("resnet18", 8), ("transformer", 8)]
)
@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_honest_models_show_no_sign(name, side, lr):
    model = built(name, side)
    quick = {"clients": 1, "steps": 2, "size": 8} if name in ("resnet18", "convnet") else {}
    last = None
    for received in honest_rounds(model, 3, side=side, lr=lr, **quick):
        found = inspect_model(received, last, model)
        assert not found.suspicious, str(found)
        last = received


# ---- what malicious servers send ----------------------------------------------------------------------------


class Imprinted(nn.Module):
    """Robbing the Fed: a layer of equal rows whose biases cut a brightness into bins, in front of the model."""

    def __init__(self, inner, inputs, bins, direction, spread=None):
        super().__init__()
        self.imprint = nn.Linear(inputs, bins)
        self.back = nn.Linear(bins, inputs)
        self.inner = inner
        edges = -torch.distributions.Normal(0.0, 1.0).icdf(torch.linspace(0.01, 0.99, bins))
        with torch.no_grad():
            rows = direction.expand(bins, inputs).clone()
            if spread is not None:
                rows *= spread[:, None]
                edges = edges * spread
            self.imprint.weight.copy_(rows)
            self.imprint.bias.copy_(edges)

    def forward(self, x):
        return self.inner(x + self.back(F.relu(self.imprint(x.flatten(1)))).view_as(x))


@pytest.mark.parametrize("direction", ["mean", "random"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_an_imprint_block_is_named(direction, scaled, shuffled):
    torch.manual_seed(0)
    way = torch.full((64,), 1 / 64) if direction == "mean" else torch.randn(64)
    spread = torch.rand(40) + 0.5 if scaled else None
    model = Imprinted(built("mlp", 8), 64, 40, way, spread)
    if shuffled:
        order = torch.randperm(40)
        with torch.no_grad():
            model.imprint.weight.copy_(model.imprint.weight[order])
            model.imprint.bias.copy_(model.imprint.bias[order])
    (sign,) = inspect_model(model).signs
    assert (sign.kind, sign.where) == ("imprint block", "imprint.weight")
    assert sign.text.startswith("40 of 40 rows are near-duplicates whose biases")
    if not scaled:
        assert ("rise or fall steadily" in sign.text) == (not shuffled)


def test_an_imprint_block_hidden_in_a_layer_of_the_agreed_model_is_named():
    model = built("mlp", 8)
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        layer.weight[10:40] = layer.weight[10].clone() + 1e-4 * torch.randn(30, layer.in_features)
        layer.bias[10:40] = torch.linspace(-1, 1, 30)
    (sign,) = inspect_model(model, expected=built("mlp", 8)).signs
    assert (sign.kind, sign.where) == ("imprint block", f"{name}.weight")


def trapped(shape, scale, *, paired=True):
    """Trap weights (Boenisch et al.): in every row half of the entries negative, the others their mirror, scaled."""
    columns = shape[1]
    made = torch.empty(shape)
    for row in made:
        order = torch.randperm(columns)
        negative = -torch.randn(columns // 2).abs() * 0.1
        row[order[: columns // 2]] = negative
        row[order[columns // 2 :]] = -scale * (negative if paired else -torch.randn(columns // 2).abs() * 0.1)
    return made


@pytest.mark.parametrize("scale", [0.95, 0.99])
@pytest.mark.parametrize("paired", [True, False])
def test_trap_weights_are_named(scale, paired):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    with torch.no_grad():
        model[1].weight.copy_(trapped((50, 64), scale, paired=paired))
    (sign,) = inspect_model(model).signs
    assert (sign.kind, sign.where) == ("trap weights", "1.weight")


def test_dead_and_duplicate_rows_are_named():
    model = built("mlp", 8)
    name, layer = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        layer.weight[:9] = 0  # fishing: only one class still learns
    (sign,) = inspect_model(model).signs
    assert str(sign) == f"dead rows in {name}.weight: 9 of 10 rows are zero"
    model = built("mlp", 8)
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        layer.weight[:20] = layer.weight[0].clone()
        layer.bias[:20] = 0
    (sign,) = inspect_model(model).signs
    assert sign.kind == "near-duplicate rows"


def test_a_block_at_the_end_of_a_large_layer_is_found():
    torch.manual_seed(3)
    layer = nn.Linear(16, 3 * MOST_ROWS)
    assert not inspect_model(layer).suspicious
    with torch.no_grad():
        layer.weight[-200:] = layer.weight[-1].clone()  # about 67 of them are among the rows looked at
        layer.bias[-200:] = torch.linspace(0, 1, 200)
    assert inspect_model(layer).signs[0].kind == "imprint block"


def test_a_tensor_far_from_the_last_rounds_is_named():
    model = built("lenet", 16)
    *_, last, received = honest_rounds(model, 2, side=16)
    name = next(name for name in reversed(received) if name.endswith("weight"))
    received[name] = received[name] + 0.3 * torch.randn_like(received[name])
    (sign,) = inspect_model(received, last).signs
    assert (sign.kind, sign.where) == ("weights far from the last round's", name)
    fresh = {name: torch.randn_like(tensor) for name, tensor in last.items()}
    assert "times their own length" in str(inspect_model(fresh, last).signs[0])


def test_a_changed_architecture_is_named():
    model, other = built("mlp", 8), Imprinted(built("mlp", 8), 64, 4, torch.randn(64))
    found = [str(sign) for sign in inspect_model(other, expected=model).signs]
    assert any(line.startswith("changed architecture: new: back.bias, back.weight") for line in found)
    assert any(line.startswith("changed architecture: missing:") for line in found)
    weights = dict(model.state_dict())
    name = next(iter(weights))
    wide = {**weights, name: torch.randn(7, 7)}
    assert "its shape is (7, 7), not" in str(inspect_model(wide, expected=model))
    double = {**weights, name: weights[name].double()}
    assert "its type is torch.float64, not torch.float32" in str(inspect_model(double, last=model))


def test_what_is_not_finite_is_named():
    weights = dict(built("mlp", 8).state_dict())
    name = next(iter(weights))
    weights[name] = weights[name] * torch.nan
    assert f"not finite in {name}" in str(inspect_model(weights, built("mlp", 8)))
    assert "a variance is negative" in str(inspect_model({"bn.running_var": -torch.ones(3)}))


def test_it_can_be_required():
    model = built("mlp", 8)
    fv.inspect_model(model).require()
    with torch.no_grad():
        next(m for m in model.modules() if isinstance(m, nn.Linear)).weight[:8] = 0
    with pytest.raises(FedveilError, match="the model that the server sent looks malicious: dead rows"):
        fv.inspect_model(model).require()
