"""Convolutions of few channels, or at few places, as matrix products, in the traced objective of stacked victims.

Stacking turns whatever belongs to one victim, such as the gradient of a kernel, into a convolution with a group for
every victim, and torch's libraries are slow at groups of few channels, or with kernels larger than the image. A batch
of products with patches is faster: a compiled attack on LeNet runs at 1.2 times the speed (`benchmarks/attack.py` has
both). The compiler does not do this by itself, and only the traced graph shows these convolutions, so they are replaced
there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import fold, pad, unfold
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedveil.clients.compiling import compile_once
from fedveil.clients.engine import CACHE_BYTES
from fedveil.clients.packages import Wanted, packaged
from fedveil.tree import size_in_bytes

Pair = Sequence[int]

NARROW = 16  # channels of a group; wider ones are fast as they are
LARGEST = 2**17  # numbers in the patches of an image
FEW = 32  # places that a kernel looks at; of many channels it is then larger than what it looks at


def compile_stacked(
    function: Callable[..., Any], arguments: tuple[Any, ...], model: nn.Module, identity: str | None = None
) -> Callable[..., Any]:
    """The compiled form of a function of stacked victims, for arguments of these shapes.

    Numbers and settings that the function reads are those of now. With an identity (see `clients/identity.py`) it is
    kept as a package.
    """
    # Measured on one core: with channels last ResNet-18 takes half as long again, LeNet-5 a quarter less.
    large = size_in_bytes(model.parameters()) > CACHE_BYTES
    kept = packaged(
        Wanted(
            name="attack step",
            function=function,
            arguments=arguments,
            identity=identity,
            expected=lambda: function(*arguments),
            options={"layout_optimization": False} if large else {},
            rewritten=_rewritten,
        )
    )
    if kept is not None:
        return kept
    compiled = partial(compile_once, name="attack", keep_layout=large)
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return compiled(function)  # nothing to replace: no need to trace
    try:
        module, nest = _traced(function, arguments)
    except Exception:  # whatever a foreign module raises; the compiler may take it nevertheless, or tells why not
        return compiled(function)
    if not replace_narrow(module):
        return compiled(function)
    flat = compiled(module)
    return lambda *arguments: nest(flat(*tree_flatten(arguments)[0]))


def _rewritten(module: GraphModule) -> GraphModule:
    replace_narrow(module)
    return module


def _traced(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[GraphModule, Callable[[Any], Any]]:
    """The graph of a function of nested tensors, as a module of flat ones, and how to nest its result again."""
    flat, nested = tree_flatten(arguments)
    results = []

    def of_flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        found, shape = tree_flatten(function(*tree_unflatten(list(tensors), nested)))
        results.append(shape)
        return tuple(found)

    module = make_fx(of_flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
    return module, lambda found: tree_unflatten(list(found), results[0])


def replace_narrow(module: GraphModule) -> int:
    """Replace the convolutions that products are faster at; how many there were."""
    count = 0
    module.graph.eliminate_dead_code()
    for node in list(module.graph.nodes):
        found = _replacement(node)
        if found is None:
            continue
        old, function, arguments = found
        with module.graph.inserting_before(node):
            old.replace_all_uses_with(module.graph.call_function(function, arguments))
        count += 1
    module.graph.eliminate_dead_code()
    module.recompile()
    return count


def _replacement(node: Node) -> tuple[Node, Callable[..., Tensor], tuple[Any, ...]] | None:
    """The node to replace, the function to replace it by and its arguments."""
    function: Callable[..., Tensor]
    if node.target is torch.ops.aten.convolution.default:
        inputs, kernels, bias, stride, padding, dilation, transposed, _, groups = node.args
        narrow, few = _kind(kernels, dilation, inputs if transposed else node)
        if groups == 1 or bias is not None or not (narrow or few):
            return None
        if transposed:
            function = grouped_transposed if narrow else few_transposed
            return node, function, (inputs, kernels, stride, padding, _shape(node)[2:], groups)
        function = grouped_convolution if narrow else few_convolution
        return node, function, (inputs, kernels, stride, padding, groups)
    if node.target is torch.ops.aten.convolution_backward.default:
        slopes, inputs, kernels, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
        narrow, few = _kind(kernels, dilation, slopes)
        outputs = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if transposed:
            return None
        if groups != 1 and wanted == [False, True, False] and 1 in outputs and (narrow or few):
            function = grouped_kernel_gradient if narrow else few_kernel_gradient
            return outputs[1], function, (slopes, inputs, _shape(kernels), stride, padding, groups)
        if groups == 1 and wanted == [True, False, False] and 0 in outputs and narrow and stride != [1, 1]:
            return outputs[0], input_gradient, (slopes, kernels, stride, padding, _shape(inputs)[2:])
    return None


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _kind(kernels: Any, dilation: Any, outputs: Any) -> tuple[bool, bool]:
    """Whether products are faster: few channels, and patches that fit into the processor's cache; or few places."""
    shape = _shape(kernels)
    if len(shape) != 4 or dilation != [1, 1] or kernels.meta["val"].device.type != "cpu":
        return False, False
    places = math.prod(_shape(outputs)[2:])
    return shape[1] <= NARROW and math.prod(shape[1:]) * places <= LARGEST, shape[1] > NARROW and places <= FEW


# ---- as products: V groups, each with its own kernels, on a batch of N images ------------------------------------


def grouped_convolution(inputs: Tensor, kernels: Tensor, stride: Pair, padding: Pair, groups: int) -> Tensor:
    """`conv2d(inputs, kernels, None, stride, padding, groups=groups)`."""
    each = _by_group(inputs, groups)
    seen, height = patches(each, kernels.shape[2:], stride, padding)
    rows = _apart(kernels, groups).permute(0, 1, 3, 4, 2).flatten(2)
    return _as_batch(torch.bmm(rows, seen.mT).reshape(*rows.shape[:2], len(inputs), height, -1))


def grouped_kernel_gradient(
    slopes: Tensor, inputs: Tensor, shape: Pair, stride: Pair, padding: Pair, groups: int
) -> Tensor:
    """The gradient of that in its kernels, for slopes in its result."""
    seen, _ = patches(_by_group(inputs, groups), shape[2:], stride, padding)
    rows = _by_group(slopes, groups).transpose(1, 2).flatten(2)
    found = torch.bmm(rows, seen).reshape(*rows.shape[:2], shape[2], shape[3], shape[1])
    return found.permute(0, 1, 4, 2, 3).flatten(0, 1)


def grouped_transposed(slopes: Tensor, kernels: Tensor, stride: Pair, padding: Pair, size: Pair, groups: int) -> Tensor:
    """The gradient of that in its inputs of some size."""
    return _as_batch(_spread(_by_group(slopes, groups), _apart(kernels, groups), stride, padding, size))


def input_gradient(slopes: Tensor, kernels: Tensor, stride: Pair, padding: Pair, size: Pair) -> Tensor:
    """The same for a convolution without groups."""
    return _spread(slopes.unsqueeze(1), kernels.unsqueeze(0), stride, padding, size).squeeze(2)


def patches(images: Tensor, window: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, int]:
    """What a window sees at each place of (V, N, C, H, W), as (V, N·places, window·C), and the rows of places.

    Channels come last: then whole rows of the window stand together in memory and are copied as such.
    """
    each = pad(images, (padding[1], padding[1], padding[0], padding[0])).permute(0, 1, 3, 4, 2).contiguous()
    victims, count, height, width, channels = each.shape
    row, image = width * channels, height * width * channels
    down, across = (height - window[0]) // stride[0] + 1, (width - window[1]) // stride[1] + 1
    seen = each.as_strided(
        (victims, count, down, across, window[0], window[1] * channels),
        (count * image, image, stride[0] * row, stride[1] * channels, row, 1),
    )
    return seen.reshape(victims, count * down * across, -1), down


def _spread(slopes: Tensor, kernels: Tensor, stride: Pair, padding: Pair, size: Pair) -> Tensor:
    """Slopes (V, N, O, h, w) through kernels (V or 1, O, C, ...) back to the inputs, as (V, C, N, *size).

    Inputs at the same place modulo the stride are reached by the same entries of a kernel. For each such place a
    window of slopes is multiplied by those entries, in reverse; then the places are put side by side.
    """
    victims, count, outputs, *_ = slopes.shape
    (down, across), (own, _, channels, *_) = stride, kernels.shape
    taps = [-(-length // step) for length, step in zip(kernels.shape[3:], stride, strict=True)]
    first = [margin // step for margin, step in zip(padding, stride, strict=True)]
    places = [
        (margin + length - 1) // step + 1 - begin
        for margin, length, step, begin in zip(padding, size, stride, first, strict=True)
    ]
    margins: list[int] = []
    for axis in (1, 0):  # the last axis first, as `pad` takes them
        before = taps[axis] - 1 - first[axis]
        margins += [before, places[axis] + taps[axis] - 1 - before - slopes.shape[3 + axis]]
    seen, _ = patches(pad(slopes, margins), taps, (1, 1), (0, 0))
    whole = pad(kernels, (0, across * taps[1] - kernels.shape[4], 0, down * taps[0] - kernels.shape[3]))
    parts = whole.reshape(own, outputs, channels, taps[0], down, taps[1], across).flip(3, 5)
    rows = parts.permute(0, 2, 4, 6, 3, 5, 1).reshape(own, channels * down * across, -1)
    found = torch.bmm(rows.expand(victims, -1, -1), seen.mT)
    found = found.reshape(victims, channels, down, across, count, places[0], places[1]).permute(0, 1, 4, 5, 2, 6, 3)
    found = found.reshape(victims, channels, count, places[0] * down, places[1] * across)
    top, left = (margin - begin * step for margin, begin, step in zip(padding, first, stride, strict=True))
    return found[..., top : top + size[0], left : left + size[1]]


# ---- the same for few places and many channels: here kernels are large, and must not be copied ------------------


def few_convolution(inputs: Tensor, kernels: Tensor, stride: Pair, padding: Pair, groups: int) -> Tensor:
    """As `grouped_convolution`."""
    size = [
        (length + 2 * margin - window) // step + 1
        for length, margin, window, step in zip(inputs.shape[2:], padding, kernels.shape[2:], stride, strict=True)
    ]
    seen = _columns(inputs, kernels.shape[2:], stride, padding, groups)
    rows = _apart(kernels, groups).flatten(2)
    return _as_batch(torch.bmm(rows, seen).reshape(*rows.shape[:2], len(inputs), *size))


def few_kernel_gradient(
    slopes: Tensor, inputs: Tensor, shape: Pair, stride: Pair, padding: Pair, groups: int
) -> Tensor:
    """As `grouped_kernel_gradient`."""
    seen = _columns(inputs, shape[2:], stride, padding, groups)
    rows = _by_group(slopes, groups).transpose(1, 2).flatten(2)
    return torch.bmm(rows, seen.mT).reshape(*shape)


def few_transposed(slopes: Tensor, kernels: Tensor, stride: Pair, padding: Pair, size: Pair, groups: int) -> Tensor:
    """As `grouped_transposed`."""
    rows = _by_group(slopes, groups).transpose(1, 2).flatten(2)
    columns = torch.bmm(_apart(kernels, groups).flatten(2).mT, rows)
    columns = columns.reshape(*columns.shape[:2], len(slopes), -1).permute(2, 0, 1, 3).flatten(1, 2)
    return fold(columns, tuple(size), tuple(kernels.shape[2:]), padding=tuple(padding), stride=tuple(stride))


def _columns(images: Tensor, window: Pair, stride: Pair, padding: Pair, groups: int) -> Tensor:
    """What a window sees at each place of (N, V·C, H, W), as (V, C·window, N·places)."""
    found = unfold(images, tuple(window), padding=tuple(padding), stride=tuple(stride))
    return _by_group(found, groups).transpose(1, 2).flatten(2)


def _by_group(images: Tensor, groups: int) -> Tensor:
    """(N, V·C, H, W) as (V, N, C, H, W)."""
    return images.reshape(len(images), groups, -1, *images.shape[2:]).transpose(0, 1)


def _apart(kernels: Tensor, groups: int) -> Tensor:
    """(V·O, C, ...) as (V, O, C, ...)."""
    return kernels.reshape(groups, -1, *kernels.shape[1:])


def _as_batch(images: Tensor) -> Tensor:
    """(V, C, N, H, W) as (N, V·C, H, W)."""
    return images.permute(2, 0, 1, 3, 4).flatten(1, 2)
