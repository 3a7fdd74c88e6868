"""What is the same behavior, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.clients.behavior import behavior


def told(model: nn.Module, loss: Any = functional.cross_entropy) -> str:
    generator = torch.Generator().manual_seed(0)
    row = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return behavior(model, loss, row, torch.rand(3, 6, generator=generator), torch.tensor([0, 1, 2]))


def net(activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), activation(), nn.Dropout(), nn.Linear(5, 3))


def test_equal_models_behave_equally_whatever_was_drawn_before() -> None:
    first, model = told(net()), net()
    torch.rand(7)
    before = torch.get_rng_state()
    assert told(model) == told(model) == first  # batch norm's statistics do not move
    assert torch.equal(before, torch.get_rng_state())


class Reordered(nn.Linear):
    """The same sums in another order of their terms."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.flip(-1).unsqueeze(1) * self.weight.flip(-1)).sum(-1) + self.bias


def test_the_last_bits_do_not_count() -> None:
    torch.manual_seed(0)
    plain, other = nn.Linear(6, 3), Reordered(6, 3)
    other.load_state_dict(plain.state_dict())
    x = torch.rand(50, 6)
    assert not torch.equal(plain(x), other(x))
    assert told(plain) == told(other)


def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1.001 * functional.cross_entropy(outputs, targets)


def own_type(outputs: Tensor, targets: Tensor) -> Tensor:
    assert outputs.dtype == torch.float32
    return functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    "other",
    [lambda: told(net(), scaled), lambda: told(net(nn.Sigmoid)), lambda: told(net().eval())],
    ids=["loss", "forward", "mode"],
)
def test_what_computes_otherwise_is_told_apart(other: Callable[[], str]) -> None:
    assert other() != told(net())


def test_code_that_insists_on_its_own_type() -> None:
    assert told(net(), own_type) == told(net(), own_type)
    assert told(net(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))) != told(net())
