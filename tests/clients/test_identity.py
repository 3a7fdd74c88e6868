"""What compiled code depends on: settings and source of a model, and not its weights."""

import importlib
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.clients.dropout import with_keyed_dropout
from fedveil.clients.identity import code_of, identity


def network(slope=0.1, width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.LeakyReLU(slope), nn.Dropout(), nn.Linear(width, 2), nn.Dropout())


def told(model, loss=F.cross_entropy, *others):
    return identity([model, loss, *others], {name: p for name, p in model.named_parameters() if p.requires_grad})


def test_equal_models_are_equal_whatever_their_weights():
    assert told(network(seed=0)) == told(network(seed=1)) is not None
    keyed = [with_keyed_dropout(network(seed=seed))[0] for seed in (0, 1)]
    assert told(keyed[0]) == told(keyed[1]) != told(network())


def test_every_setting_counts():
    frozen, other = network(), network(seed=1)
    for model in (frozen, other):
        model[0].weight.requires_grad_(False)
    seen = [
        *(told(network()), told(network(slope=0.2)), told(network().eval()), told(frozen), told(other)),
        *(told(network(), F.mse_loss), told(network(), partial(F.cross_entropy, label_smoothing=0.1))),
        *(told(network(), partial(F.cross_entropy, label_smoothing=0.2)), told(network(), nn.CrossEntropyLoss())),
    ]
    assert None not in seen
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    "untold", [lambda output, targets: output.sum(), object(), iter([])], ids=["lambda", "object", "iterator"]
)
def test_what_cannot_be_told_is_none(untold):
    assert told(network(), untold) is None
    circle = []
    circle.append(circle)
    assert told(network(), circle) is None


def test_a_row_is_not_its_parts():
    model = network()
    assert told(model, F.cross_entropy, [1, 2], [3]) != told(model, F.cross_entropy, [1], [2, 3])
    assert told(model, F.cross_entropy, {"a", "b"}) == told(model, F.cross_entropy, {"b", "a"})


def test_the_source_of_a_model_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    for sign in ("", "-"):
        body = f"    def forward(self, x):\n        return {sign}super().forward(x)\n"
        text = f"from torch import nn\nclass Net(nn.Linear):\n{body}"
        (tmp_path / "own_network.py").write_text(text)
        sys.modules.pop("own_network", None)
        importlib.invalidate_caches()
        seen.append(told(importlib.import_module("own_network").Net(3, 2)))
    sys.modules.pop("own_network", None)
    assert None not in seen
    assert seen[0] != seen[1]


def test_the_code_of_a_package_is_hashed():
    assert code_of("fedveil.clients") == code_of("fedveil.clients") != code_of("fedveil.clients", "fedveil.tasks")
