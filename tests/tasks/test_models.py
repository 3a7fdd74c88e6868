from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedveil.errors import FedveilError
from fedveil.registry import models
from fedveil.tasks.models.lenet import LeNet
from fedveil.tasks.models.lenet5 import LeNet5
from fedveil.tasks.models.mlp import MLP
from fedveil.tasks.models.resnet18 import ResNet18, group_count

NARROW_RESNETS = [
    f"resnet18:width=4,norm={norm},activation={act}"
    for norm in ("batch", "group", "none")
    for act in ("relu", "sigmoid")
]
SPECS = ["lenet", "lenet5", "lenet5:activation=tanh", "mlp", "mlp:hidden=[],activation=sigmoid", *NARROW_RESNETS]


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 13, 30)])
@pytest.mark.parametrize("spec", SPECS)
def test_scores_have_one_column_per_class(spec: str, shape: tuple[int, ...]) -> None:
    model = models.parse(spec).build(shape, 7)
    assert model(torch.rand(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("spec", ["lenet", "mlp", *NARROW_RESNETS])
def test_digits_are_large_enough(spec: str) -> None:
    assert models.parse(spec).build((1, 8, 8), 10)(torch.rand(3, 1, 8, 8)).shape == (3, 10)


@pytest.mark.parametrize("shape, features", [((1, 28, 28), 588), ((3, 32, 32), 768)])
def test_lenet_is_that_of_the_inversion_literature(shape: tuple[int, ...], features: int) -> None:
    model = LeNet().build(shape, 10)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert [module.in_features for module in linear] == [features]
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [module.stride[0] for module in convolutions] == [2, 2, 1]
    assert {(module.out_channels, module.kernel_size[0], module.padding[0]) for module in convolutions} == {(12, 5, 2)}
    for parameter in model.parameters():
        assert parameter.abs().max() <= 0.5
        if parameter.numel() > 100:
            assert abs(parameter.std().item() - 12**-0.5) < 0.03  # that of U(−0.5, 0.5)


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 32, 32)])
def test_lenet5_has_its_classic_size(shape: tuple[int, ...]) -> None:
    # conv 1·6·25 + 6, conv 6·16·25 + 16, then 400–120–84–10
    assert size(LeNet5().build(shape, 10)) == 156 + 2416 + 48120 + 10164 + 850


def test_lenet5_refuses_small_images_up_to_its_border() -> None:
    with pytest.raises(FedveilError, match="lenet5 needs images of at least 12×12 pixels, got 8×8: try lenet or mlp"):
        LeNet5().build((1, 8, 8), 10)
    assert LeNet5().build((1, 12, 12), 10)(torch.rand(1, 1, 12, 12)).shape == (1, 10)


@pytest.mark.parametrize("spec", ["lenet", "lenet5", "resnet18"])
def test_image_models_refuse_other_shapes(spec: str) -> None:
    with pytest.raises(FedveilError, match=r"takes images \(channels, height, width\)"):
        models.parse(spec).build((20,), 2)


def test_mlp_is_that_of_spm() -> None:
    assert size(MLP().build((1, 28, 28), 10)) == 784 * 256 + 256 + 256 * 10 + 10
    assert size(MLP(hidden=()).build((5,), 2)) == 12
    with pytest.raises(FedveilError, match="hidden"):
        MLP(hidden=(0,))


def test_resnet18_has_its_published_size() -> None:
    assert size(ResNet18().build((3, 32, 32), 10)) == 11_173_962
    # torchvision's resnet18 for 224 pixels and 1000 classes
    assert size(ResNet18().build((3, 224, 224), 1000)) == 11_689_512


def test_resnet18_stem_depends_on_the_image() -> None:
    small, large = (ResNet18(width=4).build((3, side, side), 2) for side in (64, 65))
    assert not any(isinstance(module, nn.MaxPool2d) for module in small.modules())
    assert any(isinstance(module, nn.MaxPool2d) for module in large.modules())
    assert large(torch.rand(2, 3, 65, 65)).shape == (2, 2)


@pytest.mark.parametrize("width", [1, 3, 6, 16, 64, 96])
def test_groups_divide_the_channels(width: int) -> None:
    for stage in range(4):
        channels = width * 2**stage
        groups = group_count(channels)
        assert channels % groups == 0
        assert 1 <= groups <= 32
        assert channels // groups >= min(4, channels)


def test_resnet18_without_norm_tells_inputs_apart() -> None:
    torch.manual_seed(0)
    model = ResNet18(norm="none", width=16).build((3, 32, 32), 10)
    assert model(torch.randn(8, 3, 32, 32)).std(0).mean() > 0.03


def loss_of(model: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(functional_call(model, (params, buffers), (x,)), y)


@pytest.mark.parametrize("spec", SPECS)
def test_stacked_gradients_equal_a_loop(spec: str) -> None:
    torch.manual_seed(0)
    model = models.parse(spec).build((1, 16, 16), 3).double().train()
    x, y = torch.rand(2, 4, 1, 16, 16, dtype=torch.float64), torch.randint(0, 3, (2, 4))
    params = {name: value.detach() for name, value in model.named_parameters()}
    buffers = {name: value.detach() for name, value in model.named_buffers()}
    one = grad(lambda p, b, x, y: loss_of(model, p, b, x, y))

    moved = {name: torch.stack([value, value]) for name, value in buffers.items()}
    doubled = {name: torch.stack([value, value]) for name, value in params.items()}
    stacked = vmap(one)(doubled, moved, x, y)
    for client in range(2):
        alone = {name: value.clone() for name, value in buffers.items()}
        expected = one(params, alone, x[client], y[client])
        for name, value in expected.items():
            torch.testing.assert_close(stacked[name][client], value)
        for name, value in alone.items():  # running statistics move as well
            torch.testing.assert_close(moved[name][client], value)
            assert not value.equal(buffers[name])


@pytest.mark.parametrize("spec", SPECS)
def test_second_derivatives_reach_the_input(spec: str) -> None:
    torch.manual_seed(0)
    model = models.parse(spec).build((1, 16, 16), 3)
    x = torch.rand(2, 1, 16, 16, requires_grad=True)
    loss = functional.cross_entropy(model(x), torch.tensor([0, 2]))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (inner,) = torch.autograd.grad(sum(g.square().sum() for g in gradients), x)
    assert torch.isfinite(inner).all()
    assert inner.abs().sum() > 0
