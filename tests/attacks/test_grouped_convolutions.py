"""Convolutions of few channels as matrix products: equal to torch's own, and found in a traced objective."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from fedveil.attacks import grouped_convolutions as grouped
from fedveil.attacks import matcher
from fedveil.clients import packages

from .small import Choices, match, on_the_way, random_problem

# Window, stride, padding, size of the image: odd and even, margins wider than a step, rows unlike columns.
SHAPES = [
    ((5, 5), (2, 2), (2, 2), (32, 32)),
    ((5, 5), (1, 1), (2, 2), (8, 8)),
    ((5, 3), (2, 2), (2, 1), (9, 11)),
    ((3, 2), (3, 2), (0, 1), (10, 7)),
    ((4, 4), (2, 1), (3, 0), (9, 8)),
    ((1, 1), (2, 2), (0, 0), (7, 8)),  # a step wider than the window
]


@pytest.mark.parametrize("window, stride, padding, size", SHAPES)
def test_products_equal_convolutions(window, stride, padding, size):
    torch.manual_seed(0)
    groups, count, channels, outputs = 4, 2, 3, 5
    inputs = torch.randn(count, groups * channels, *size, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(groups * outputs, channels, *window, dtype=torch.float64, requires_grad=True)
    result = F.conv2d(inputs, kernels, None, stride, padding, groups=groups)
    slopes = torch.randn_like(result)
    of_inputs, of_kernels = torch.autograd.grad(result, (inputs, kernels), slopes)

    for convolution in (grouped.grouped_convolution, grouped.few_convolution):
        torch.testing.assert_close(convolution(inputs, kernels, stride, padding, groups), result)
    for kernel_gradient in (grouped.grouped_kernel_gradient, grouped.few_kernel_gradient):
        found = kernel_gradient(slopes, inputs, kernels.shape, stride, padding, groups)
        torch.testing.assert_close(found, of_kernels)
    for transposed in (grouped.grouped_transposed, grouped.few_transposed):
        found = transposed(slopes, kernels, stride, padding, size, groups)
        torch.testing.assert_close(found, of_inputs)

    shared = kernels[:outputs].detach()
    inputs = inputs[:, :channels].detach().requires_grad_()
    result = F.conv2d(inputs, shared, None, stride, padding)
    slopes = torch.randn_like(result)
    expected = torch.autograd.grad(result, inputs, slopes)[0]
    torch.testing.assert_close(grouped.input_gradient(slopes, shared, stride, padding, size), expected)


def small_net(channels=4):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, channels, 3, stride=2, padding=1),
        nn.Sigmoid(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(channels * 16, 3),
    )


def traced_objective(net, batch):
    """The slope of a cost of the gradient in the inputs, for three stacked victims: what an attack evaluates."""
    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    images, labels = torch.randn(3, batch, 2, 8, 8), torch.randint(0, 3, (3, batch))

    def objective(images, labels):
        def loss(params):
            return F.cross_entropy(torch.func.functional_call(net, params, (images,)), labels)

        return sum(slope.pow(3).sum() for slope in grad(loss)(params).values())

    function = vmap(grad(objective))
    return function, (images, labels)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_traced_objective_with_products_gives_the_same(batch):
    function, arguments = traced_objective(small_net(), batch)
    module, nest = grouped._traced(function, arguments)
    # Both layers: the gradient of the kernels and its two derivatives; and the strided one's input gradient.
    assert grouped.replace_narrow(module) == 7
    torch.testing.assert_close(nest(module(*arguments)), function(*arguments), rtol=1e-4, atol=1e-6)


def test_wide_convolutions_are_replaced_at_few_places_only(monkeypatch):
    function, arguments = traced_objective(small_net(channels=grouped.NARROW + 1), 2)
    module, nest = grouped._traced(function, arguments)
    assert grouped.replace_narrow(module) == 7  # the second layer has 16 places
    torch.testing.assert_close(nest(module(*arguments)), function(*arguments), rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(grouped, "FEW", 15)
    module, _ = grouped._traced(function, arguments)
    assert grouped.replace_narrow(module) == 4  # those of the first layer, whose inputs have two channels


@pytest.mark.compiles
def test_compiled_attack_on_a_narrow_net_equals_the_stacked_one_and_is_kept(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))
    monkeypatch.setattr(grouped, "compile_once", lambda *_, **__: pytest.fail("compiled by torch.compile"))
    problem = random_problem(small_net(), (2, 8, 8), victims=3)
    choices = Choices(steps=3, total_variation=1e-3)
    found = match(problem, choices, backend="compiled")
    expected = match(problem, choices, backend="stacked")
    torch.testing.assert_close(on_the_way(found), on_the_way(expected), rtol=1e-3, atol=1e-3)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fedveil"]
    assert line.startswith("compiling the attack step of this model")
    monkeypatch.setattr(packages, "_made", lambda *_: pytest.fail("made again"))
    matcher._matchers.clear()  # as in another process
    again = match(problem, choices, backend="compiled")
    assert torch.equal(again.inputs, found.inputs)
