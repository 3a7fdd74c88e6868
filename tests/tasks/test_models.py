from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedveil.clients.choose import why_not_stacked
from fedveil.errors import FedveilError
from fedveil.registry import models
from fedveil.tasks.models.cnn import CNN
from fedveil.tasks.models.convnet import ConvNet
from fedveil.tasks.models.lenet import LeNet
from fedveil.tasks.models.lenet5 import LeNet5
from fedveil.tasks.models.mlp import MLP
from fedveil.tasks.models.norms import group_count
from fedveil.tasks.models.resnet18 import ResNet18

NARROW_RESNETS = [
    f"resnet18:width=4,norm={norm},activation={act}"
    for norm in ("batch", "group", "none")
    for act in ("relu", "sigmoid")
]
NARROW_CONVNETS = [f"convnet:width=4,norm={norm}" for norm in ("batch", "group", "none")]
SPECS = [
    *("lenet", "lenet5", "lenet5:activation=tanh", "mlp", "mlp:hidden=[],activation=sigmoid", "cnn", "cnn:kernel=5"),
    *NARROW_RESNETS,
    *NARROW_CONVNETS,
]


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("spec", SPECS)
def test_scores_have_one_column_per_class(spec: str) -> None:
    for shape in ((3, 32, 32), (1, 13, 30)):
        assert models.parse(spec).build(shape, 7)(torch.rand(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("spec", ["lenet", "mlp", "cnn", "resnet18:width=4,norm=batch", "resnet18:width=4,norm=group"])
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


@pytest.mark.parametrize("spec", ["lenet", "lenet5", "resnet18", "convnet", "cnn"])
def test_image_models_refuse_other_shapes(spec: str) -> None:
    with pytest.raises(FedveilError, match=r"takes images \(channels, height, width\)"):
        models.parse(spec).build((20,), 2)


def test_mlp_is_that_of_spm() -> None:
    assert size(MLP().build((1, 28, 28), 10)) == 784 * 256 + 256 + 256 * 10 + 10
    assert size(MLP(hidden=()).build((5,), 2)) == 12
    with pytest.raises(FedveilError, match="hidden"):
        MLP(hidden=(0,))


def shapes(model: nn.Module, images: Tensor) -> list[tuple[int, ...]]:
    """What each convolution, pooling and linear layer gives, without the batch axis."""
    found: list[tuple[int, ...]] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.Linear):
            module.register_forward_hook(lambda _, __, output: found.append(tuple(output.shape[1:])))
    model(images)
    return found


def test_convnet_is_that_of_inverting_gradients() -> None:
    model = ConvNet().build((3, 32, 32), 10)
    assert shapes(model, torch.rand(2, 3, 32, 32)) == [
        *[(64, 32, 32), (128, 32, 32), (128, 32, 32), (256, 32, 32), (256, 32, 32), (256, 32, 32), (256, 10, 10)],
        *[(256, 10, 10), (256, 10, 10), (256, 3, 3), (10,)],
    ]
    kinds = [type(module) for module in model]  # type: ignore[attr-defined]
    block = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    assert kinds == [*block * 6, nn.MaxPool2d, *block * 2, nn.MaxPool2d, nn.Flatten, nn.Linear]
    assert model[-1].in_features == 36 * 64  # type: ignore[index, union-attr]
    convolutions = 3 * 64 * 9 + 64 * 128 * 9 + 128 * 128 * 9 + 128 * 256 * 9 + 4 * 256 * 256 * 9
    channels = 64 + 128 + 128 + 5 * 256  # each has a bias, and a scale and a shift of its norm
    assert size(model) == convolutions + 3 * channels + 2304 * 10 + 10 == 2_904_970


@pytest.mark.parametrize("side, features", [(9, 4), (28, 36), (64, 196), (224, 2304)])
def test_convnet_adapts_its_linear_layer(side: int, features: int) -> None:
    model = ConvNet(width=1).build((1, side, side), 5)
    assert model[-1].in_features == features  # type: ignore[index, union-attr]
    assert model(torch.rand(2, 1, side, side)).shape == (2, 5)


def test_convnet_without_norm_tells_inputs_apart() -> None:
    torch.manual_seed(0)
    model = ConvNet(norm="none", width=16).build((3, 32, 32), 10)
    assert model(torch.randn(8, 3, 32, 32)).std(0).mean() > 0.03


def test_cnn_is_that_of_spm() -> None:
    model = CNN().build((3, 32, 32), 10)
    assert shapes(model, torch.rand(2, 3, 32, 32)) == [
        *[(64, 32, 32), (64, 16, 16), (128, 16, 16), (128, 8, 8), (384,), (192,), (10,)]
    ]
    convolutions = (3 * 64 * 9 + 64) + (64 * 128 * 9 + 128)
    assert size(model) == convolutions + (8192 * 384 + 384) + (384 * 192 + 192) + (192 * 10 + 10) == 3_297_610
    assert size(CNN(kernel=5).build((3, 32, 32), 10)) == 3_297_610 + (3 * 64 + 64 * 128) * 16
    with pytest.raises(FedveilError, match="kernel"):
        CNN(kernel=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec, smallest", [("convnet", 9), ("cnn", 4)])
def test_small_images_are_refused_up_to_the_border(spec: str, smallest: int) -> None:
    less = smallest - 1
    words = f"{spec} needs images of at least {smallest}×{smallest} pixels, got 40×{less}: try lenet or mlp"
    with pytest.raises(FedveilError, match=words):
        models.parse(spec).build((1, 40, less), 3)
    shape = (1, smallest, smallest)
    assert models.parse(spec).build(shape, 3)(torch.rand(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("spec", ["cnn", "resnet18:width=4", *NARROW_CONVNETS])
def test_clients_can_be_stacked(spec: str) -> None:
    model = models.parse(spec).build((3, 32, 32), 10)
    sample = torch.rand(4, 3, 32, 32), torch.arange(4)
    assert why_not_stacked(model, functional.cross_entropy, sample) is None


def test_resnet18_has_its_published_size() -> None:
    assert size(ResNet18().build((3, 32, 32), 10)) == 11_173_962
    # torchvision's resnet18 for 224 pixels and 1000 classes
    assert size(ResNet18().build((3, 224, 224), 1000)) == 11_689_512


def test_resnet18_stem_depends_on_the_image() -> None:
    small, large = (ResNet18(width=4).build((3, side, side), 2) for side in (64, 65))
    assert not any(isinstance(module, nn.MaxPool2d) for module in small.modules())
    assert any(isinstance(module, nn.MaxPool2d) for module in large.modules())
    assert large(torch.rand(2, 3, 65, 65)).shape == (2, 2)


@pytest.mark.parametrize("side, left", [(28, 4), (32, 4), (64, 8), (224, 7), (256, 8)])
def test_resnet18_leaves_some_pixels_before_the_mean(side: int, left: int) -> None:
    model = ResNet18(width=4).build((3, side, side), 10)
    found: list[tuple[int, ...]] = []
    model.blocks.register_forward_hook(lambda _, __, output: found.append(tuple(output.shape)))  # type: ignore[operator, union-attr]
    assert model(torch.rand(2, 3, side, side)).shape == (2, 10)
    assert found == [(2, 32, left, left)]
    stem = model.stem[0]  # type: ignore[index]
    assert (stem.kernel_size, stem.stride) == (((3, 3), (1, 1)) if side <= 64 else ((7, 7), (2, 2)))


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
