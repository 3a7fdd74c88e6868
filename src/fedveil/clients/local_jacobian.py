"""The lengths of all rows of a network's Jacobian, for networks of convolutions: far cheaper than a pass for each row.

A unit of such a network sees a part of the picture only. So the Jacobian of a layer is kept as blocks: for the units of
one row of the layer, the rows of the picture that they see. A convolution takes blocks to blocks by one product of
matrices for each row of its kernel, for all columns, channels and examples at once. Nothing is left out or estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedveil.clients.graph import NotUnderstood

# Operations that treat every entry alone, and those that change no entry at all.
_ENTRYWISE = {
    f"{name}Backward0"
    for name in ("Sigmoid", "Tanh", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Softplus", "Hardtanh", "Mish")
}
_PASSING = {"CloneBackward0"}
_FLATTENING = {"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"}
COLUMNS = 9  # of a picture, about, that are treated together: units that do not see them are left out
MOST_ENTRIES = 2**25  # of a layer's blocks at once: fewer examples are treated together where there would be more
# A product of matrices is so many times as fast as the small convolutions of single passes.
FASTER = 4


@dataclass(frozen=True, eq=False)
class Convolution:
    """One of the network, from rows of (width, channels) to such rows."""

    weight: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    given: tuple[int, int, int]  # channels, height and width of its input
    made: tuple[int, int, int]  # and of its output

    def reached(self, columns: range) -> range:
        """The columns of the output that some columns of the input take part in."""
        far = self.dilation[1] * (self.weight.shape[3] - 1)
        first = -((far - self.padding[1] - columns.start) // self.stride[1])
        return range(max(0, first), min(self.made[2], (columns.stop - 1 + self.padding[1]) // self.stride[1] + 1))

    def matrices(self, columns: range) -> Tensor:
        """For each row of the kernel, what takes some columns of a row of the input to the output: (kh, w'c', wc)."""
        reached = torch.tensor(self.reached(columns), device=self.weight.device)
        kernel = torch.arange(self.weight.shape[3], device=self.weight.device)
        met = reached[:, None] * self.stride[1] - self.padding[1] + kernel * self.dilation[1]  # (w', kw)
        given = torch.tensor(columns, device=self.weight.device)
        ones = (met[:, None, :] == given[None, :, None]).to(self.weight)  # (w', w, kw)
        found = torch.einsum("cgyd,xwd->yxcwg", self.weight, ones)
        return found.reshape(self.weight.shape[2], len(reached) * self.made[0], len(columns) * self.given[0])

    def rows(self, place: int) -> list[tuple[int, int]]:
        """The rows of the input that a row of the output is made of, each with the row of the kernel it meets."""
        first = place * self.stride[0] - self.padding[0]
        met = [(first + step * self.dilation[0], step) for step in range(self.weight.shape[2])]
        return [(row, step) for row, step in met if 0 <= row < self.given[1]]


Layer = Convolution | Tensor  # a tensor: the derivatives of an entrywise operation, (B, channels, height, width)


@torch.no_grad()
def row_lengths(features: Tensor, inputs: Tensor, count: int) -> Tensor:
    """The length of ∂feature/∂input for all features (B, n) of every example, if `count` of them are worth it: (B, n).

    features: must have been made of the inputs (B, channels, height, width), with autograd.
    """
    layers = _layers(features, inputs)
    size = len(inputs)
    most = _check_worth(layers, tuple(inputs.shape[1:]), count)
    together = max(1, min(size, MOST_ENTRIES // most))
    parts = []
    for first in range(0, size, together):
        some = slice(first, first + together)
        parts.append(_lengths([layer if isinstance(layer, Convolution) else layer[some] for layer in layers], inputs))
    return torch.cat([part.expand(min(together, size - k * together), -1) for k, part in enumerate(parts)])


def _lengths(layers: Sequence[Layer], inputs: Tensor) -> Tensor:
    """The same for some examples; a single row where no entrywise operation made them differ."""
    width = inputs.shape[3]
    step = math.ceil(width / max(1, width // COLUMNS))
    made = [layer.made for layer in layers if isinstance(layer, Convolution)][-1]
    squares: Tensor | float = 0.0
    for first in range(0, width, step):
        squares = squares + _squares(layers, inputs, range(first, min(first + step, width)))
    assert isinstance(squares, Tensor)
    return squares.sqrt().reshape(made[1], made[2], made[0], -1).permute(3, 2, 0, 1).flatten(1)


def _squares(layers: Sequence[Layer], inputs: Tensor, columns: range) -> Tensor:
    """What some columns of the pictures add to the squared lengths: (h, wc, examples)."""
    channels, height = inputs.shape[1:3]
    pixels = torch.eye(len(columns) * channels, dtype=inputs.dtype, device=inputs.device)
    blocks = [pixels.reshape(len(pixels), 1, 1, -1)] * height  # (units, rows seen, examples, pixels of a row)
    apart = 1  # by how many rows of the picture the units of neighboring rows are moved
    scale: Tensor | None = None  # derivatives that the blocks are still to be multiplied with: (h, units, examples)
    last = max(place for place, layer in enumerate(layers) if isinstance(layer, Convolution))
    found = pixels
    for place, layer in enumerate(layers):
        if isinstance(layer, Tensor):
            own = layer[..., columns.start : columns.stop].permute(2, 3, 1, 0).flatten(1, 2)
            scale = own if scale is None else scale * own
            continue
        if scale is not None:
            blocks = [block * own[:, None, :, None] for block, own in zip(blocks, scale, strict=True)]
        scale = None
        made = _Blocks(layer, blocks, apart, columns)
        columns = layer.reached(columns)
        if place == last:
            found = torch.stack([_norms(block) for block in made.passing()])
        else:
            blocks = made.kept()
        apart, channels = apart * layer.stride[0], layer.made[0]
        width = layer.made[2]
    found = (found if scale is None else found * scale).square()
    return torch.nn.functional.pad(found, (0, 0, columns.start * channels, (width - columns.stop) * channels))


def _norms(block: Tensor) -> Tensor:
    """The length of each unit's part, for every example: (units, examples)."""
    inner: Tensor = torch.linalg.vector_norm(block, dim=3)
    lengths: Tensor = torch.linalg.vector_norm(inner, dim=1)
    return lengths


class _Blocks:
    """The blocks of the output of a convolution, one for each of its rows."""

    def __init__(self, layer: Convolution, blocks: Sequence[Tensor], apart: int, columns: range) -> None:
        self._layer = layer
        self._given = [block.flatten(1) for block in blocks]
        self._matrices = layer.matrices(columns)
        seen, *self._inside = blocks[0].shape[1:]
        self._shift = apart * layer.dilation[0]
        self._seen = seen + self._shift * (len(self._matrices) - 1)

    def kept(self) -> list[Tensor]:
        """All of them."""
        return [self._block(place, self._room()) for place in range(self._layer.made[1])]

    def passing(self) -> Iterator[Tensor]:
        """One after another in the same memory: the system need not clear any for each."""
        room = self._room()
        for place in range(self._layer.made[1]):
            yield self._block(place, room)

    def _room(self) -> Tensor:
        inside = self._seen * math.prod(self._inside)
        return self._matrices.new_empty(self._matrices.shape[1], inside)

    def _block(self, place: int, room: Tensor) -> Tensor:
        room.zero_()
        row_size = math.prod(self._inside)
        for row, step in self._layer.rows(place):
            first, given = step * self._shift * row_size, self._given[row]
            room[:, first : first + given.shape[1]].addmm_(self._matrices[step], given)
        return room.reshape(len(room), self._seen, *self._inside)


def _layers(features: Tensor, inputs: Tensor) -> list[Layer]:
    """The operations that made the features of the inputs, from the first on."""
    found: list[Layer] = []
    node: Any = features.grad_fn
    if inputs.dim() != 4 or features.dim() != 2:
        raise NotUnderstood
    shape: tuple[int, ...] | None = None  # of what the operation at hand made, once it is a picture
    while node is not None and getattr(node, "variable", None) is not inputs:
        kind = node.name()
        if kind in _FLATTENING and shape is None:
            shape = tuple(node._saved_self_sym_sizes)
            if len(shape) != 4 or shape[0] != len(inputs) or math.prod(shape[1:]) != features.shape[1]:
                raise NotUnderstood
        elif kind in _ENTRYWISE and shape is not None:
            found.append(node(torch.ones(shape, dtype=inputs.dtype, device=inputs.device)))
        elif kind == "ConvolutionBackward0" and shape is not None:
            layer = _convolution(node, shape)
            found.append(layer)
            shape = (shape[0], *layer.given)
        elif kind not in _PASSING:
            raise NotUnderstood
        node = node.next_functions[0][0]
    if node is None or shape != tuple(inputs.shape) or not any(isinstance(each, Convolution) for each in found):
        raise NotUnderstood
    return found[::-1]


def _convolution(node: Any, shape: tuple[int, ...]) -> Convolution:
    weight, given, groups = node._saved_weight, node._saved_input.shape, node._saved_groups
    if node._saved_transposed or weight.dim() != 4 or given[0] != shape[0]:
        raise NotUnderstood
    if groups > 1:  # as one that has zeros between the groups
        parts = weight.chunk(groups)
        weight = torch.cat(
            [
                torch.nn.functional.pad(part, (0, 0, 0, 0, k * part.shape[1], (groups - 1 - k) * part.shape[1]))
                for k, part in enumerate(parts)
            ]
        )
    stride, padding, dilation = (
        (each[0], each[1]) for each in (node._saved_stride, node._saved_padding, node._saved_dilation)
    )
    (_, *taken), (_, *made) = given, shape
    return Convolution(weight, stride, padding, dilation, (taken[0], taken[1], taken[2]), (made[0], made[1], made[2]))


def _check_worth(layers: Sequence[Layer], shape: tuple[int, ...], count: int) -> int:
    """Refuse a network in which units see too much of the picture; gives the most entries of blocks per example."""
    seen, apart, most, here, there = 1, 1, 1, 0, 0
    pixels = shape[0] * shape[2]
    for layer in layers:
        if isinstance(layer, Convolution):
            made, taken = math.prod(layer.made), layer.given[0] * layer.given[2]
            here += made * layer.weight.shape[2] * taken * seen * pixels
            there += made * layer.weight[0].numel()
            seen += apart * layer.dilation[0] * (layer.weight.shape[2] - 1)
            apart *= layer.stride[0]
            most = max(most, made * seen * pixels)
    if most > MOST_ENTRIES or here > FASTER * count * there:
        raise NotUnderstood
    return most
