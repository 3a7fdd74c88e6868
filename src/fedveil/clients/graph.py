"""What autograd has noted of a forward pass: where every parameter was used, and with what.

The graph behind an output is the computation itself. So whatever a model does, through its layers or by functions, with
a weight once or several times: each use of a parameter is found there, or the graph is not understood, and that is
known too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fedveil.clients.shares import Convolved, Looked, Product, Rows, Share, Window
from fedveil.tree import at_least_single

_PASSING = ("TBackward0", "ToCopyBackward0")  # operations between a parameter and the one that uses it


class NotUnderstood(Exception):
    """What was computed is none of what is known here: go another way."""


class Meeting(NamedTuple):
    """A parameter that goes into an operation."""

    place: int  # which of the operation's inputs it is
    name: str
    parameter: Tensor
    turned: bool  # it was transposed on its way


# (the arguments of an operation by example, the gradient in its output by example) -> the share of a parameter
Sharing = Callable[[Tensor | None, Tensor], Share]


@dataclass(frozen=True, eq=False)
class Site:
    """One use of a parameter by an operation, whose tensors begin with rows: some number of them for each example."""

    name: str
    edge: int  # which gradient it needs, among the edges of the reading
    axes: int  # how many leading axes of the gradient are rows; below zero: all but so many of the last
    taken: Tensor | None  # what else went in, with one axis of rows
    sharing: Sharing

    def share(self, gradient: Tensor, size: int, minor: bool) -> Share:
        """The share of the parameter, given the gradient in the output for a batch of `size` examples."""
        taken = None if self.taken is None else by_example(at_least_single(self.taken), size, minor)
        return self.sharing(taken, by_example(self.rows(gradient), size, minor))

    def rows(self, gradient: Tensor) -> Tensor:
        """The gradient with one axis of rows."""
        axes = self.axes if self.axes > 0 else gradient.dim() + self.axes
        if axes < 1:
            raise NotUnderstood
        return at_least_single(gradient if axes == 1 else gradient.flatten(0, axes - 1))


@dataclass(frozen=True, eq=False)
class Reading:
    """What was found in a graph: equal signatures are equal computations, whatever the size of the batch."""

    signature: tuple[Any, ...]
    sites: Sequence[Site]
    edges: Sequence[GradientEdge]  # the outputs of the operations that use parameters

    def gradients(self, losses: Tensor, weights: Tensor, *, again: bool = False) -> list[Tensor | None]:
        """The gradients of the weighted sum of the losses in those outputs. No parameter's own is computed."""
        return list(torch.autograd.grad(losses, self.edges, weights, retain_graph=again, allow_unused=True))


def by_example(rows: Tensor, size: int, minor: bool) -> Tensor:
    """Rows as (example, its rows, ...). `minor`: the first rows of all examples come first, then the second ones."""
    if len(rows) % size:
        raise NotUnderstood
    several, behind = len(rows) // size, rows.shape[1:]
    return rows.reshape(several, size, *behind).transpose(0, 1) if minor else rows.reshape(size, several, *behind)


@torch.no_grad()
def read(losses: Tensor, parameters: Mapping[str, Tensor]) -> Reading:
    """Every use of the parameters in the graph behind the losses."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    sites: list[Site] = []
    edges: list[GradientEdge] = []
    words: list[Any] = []
    seen, waiting = set(), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = node.name()
        words.append((kind, len(node.next_functions)))
        met = []
        for place, (before, _) in enumerate(node.next_functions):
            found = _parameter_behind(before, names)
            if found is None:
                waiting.append(before)
            else:
                met.append(Meeting(place, *found))
        if not met:
            continue
        rule = _RULES.get(kind)
        try:
            new = rule(node, met) if rule else None
        except AttributeError:  # another version of torch may note other things of an operation
            new = None
        if new is None:
            raise NotUnderstood
        words.extend((place, name, turned) for place, name, _, turned in met)
        edges.append(GradientEdge(node, 0))
        sites.extend(Site(name, len(edges) - 1, axes, taken, sharing) for name, axes, taken, sharing in new)
    return Reading(tuple(words), sites, edges)


def _parameter_behind(node: Any, names: Mapping[int, str]) -> tuple[str, Tensor, bool] | None:
    """The parameter that a chain of passing operations starts from, if one does."""
    turned = False
    while node is not None and node.name() in _PASSING:
        turned ^= node.name() == "TBackward0"
        node = node.next_functions[0][0]
    parameter = getattr(node, "variable", None)
    return None if parameter is None or id(parameter) not in names else (names[id(parameter)], parameter, turned)


class Found(NamedTuple):
    """A site, but for its place among the edges."""

    name: str
    axes: int
    taken: Tensor | None
    sharing: Sharing


# ---- the operations that are understood -------------------------------------------------------------------------


def _summed(name: str, parameter: Tensor, axes: int) -> Found:
    """A parameter that is added to every row, such as a bias. No axes: as many as its own leave."""
    shape, own = parameter.shape, list(parameter.shape)
    while own and own[0] == 1:
        own.pop(0)

    def share(_: Tensor | None, slope: Tensor) -> Share:
        if list(slope.shape[2:]) not in (own, list(shape)):  # it was repeated along more than the rows
            raise NotUnderstood
        return Rows(slope.sum(1).reshape(len(slope), *shape))

    return Found(name, axes or -len(own), None, share)


def _addmm(node: Any, met: Sequence[Meeting]) -> list[Found] | None:
    """bias + rows @ weight."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    found = []
    for place, name, parameter, turned in met:
        if place == 0 and parameter.dim() == 1 and not turned:
            found.append(_summed(name, parameter, 1))
        elif place == 2:
            found.append(_weight(name, node._saved_mat1, turned))
        else:
            return None
    return found


def _mm(node: Any, met: Sequence[Meeting]) -> list[Found] | None:
    """rows @ weight."""
    if [each.place for each in met] != [1]:
        return None
    return [_weight(met[0].name, node._saved_self, met[0].turned)]


def _weight(name: str, rows: Tensor, turned: bool) -> Found:
    def share(taken: Tensor | None, slope: Tensor) -> Share:
        assert taken is not None
        return Product(taken, slope, flipped=not turned)

    return Found(name, 1, rows, share)


def _convolution(node: Any, met: Sequence[Meeting]) -> list[Found] | None:
    """A convolution in one or two dimensions, with or without groups."""
    settings = [tuple(each) for each in (node._saved_stride, node._saved_padding, node._saved_dilation)]
    if node._saved_transposed or len(settings[0]) > 2 or any(each.turned for each in met):
        return None
    found = []
    for place, name, parameter, _ in met:
        if place == 1:
            stride, padding, dilation = map(_planar, settings, (1, 0, 1))
            window = Window(_planar(tuple(parameter.shape[2:]), 1), stride, padding, dilation, node._saved_groups)
            found.append(_convolved(name, node._saved_input, window, parameter.shape))
        elif place == 2:
            found.append(Found(name, 1, None, lambda _, slope: Rows(_channels(slope))))
        else:
            return None
    return found


def _planar(numbers: tuple[int, ...], missing: int) -> tuple[int, int]:
    """The numbers of a window in two dimensions; one in a single dimension has a height of one."""
    return (missing, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _convolved(name: str, inputs: Tensor, window: Window, shape: torch.Size) -> Found:
    def share(taken: Tensor | None, slope: Tensor) -> Share:
        assert taken is not None
        met, back = (part.unsqueeze(3) if part.dim() == 4 else part for part in (taken, slope))
        return Convolved(met, back, window, shape)

    return Found(name, 1, inputs, share)


def _layer_norm(node: Any, met: Sequence[Meeting]) -> list[Found] | None:
    """(x - mean) / deviation * weight + bias over the last axes."""
    inputs, last = node._saved_input, len(node._saved_normalized_shape)
    axes = inputs.dim() - last
    if axes < 1 or any(each.turned for each in met):
        return None
    found = []
    for place, name, parameter, _ in met:
        if place == 1:
            scaled = (inputs - node._saved_result1) * node._saved_result2
            found.append(Found(name, axes, scaled.flatten(0, axes - 1), _times))
        elif place == 2:
            found.append(_summed(name, parameter, axes))
        else:
            return None
    return found


def _times(taken: Tensor | None, slope: Tensor) -> Share:
    """A parameter that every row is multiplied with, entry by entry."""
    assert taken is not None
    if taken.shape != slope.shape:
        raise NotUnderstood
    return Rows((taken * slope).sum(1))


def _group_norm(node: Any, met: Sequence[Meeting]) -> list[Found] | None:
    """(x - mean) / deviation * weight + bias, with the mean and deviation of a group of channels."""
    if any(each.turned for each in met):
        return None
    found = []
    for place, name, _, _ in met:
        if place == 1:
            found.append(_scaled_channels(name, node))
        elif place == 2:
            found.append(Found(name, 1, None, lambda _, slope: Rows(_channels(slope))))
        else:
            return None
    return found


def _scaled_channels(name: str, node: Any) -> Found:
    inputs, groups = node._saved_input, node._saved_group
    grouped = inputs.reshape(len(inputs), groups, inputs.shape[1] // groups, -1)
    mean, scale = node._saved_result1[:, :, None, None], node._saved_result2[:, :, None, None]
    scaled = ((grouped - mean) * scale).reshape(inputs.shape)

    def share(taken: Tensor | None, slope: Tensor) -> Share:
        assert taken is not None
        return Rows(_channels(taken * slope))

    return Found(name, 1, scaled, share)


def _channels(slope: Tensor) -> Tensor:
    """The sum over the rows and places of every channel: (B, channels) of (B, rows, channels, ...)."""
    return slope.reshape(*slope.shape[:3], -1).sum((1, 3))


def _embedding(node: Any, met: Sequence[Meeting]) -> list[Found] | None:
    """Rows of a table."""
    if node._saved_scale_grad_by_freq or node._saved_sparse or met[0].turned:
        return None
    numbers, parameter, padding = node._saved_indices, met[0].parameter, node._saved_padding_idx
    if not numbers.dim():
        return None
    # A number below zero stands for none; torch keeps it without its sign.
    none = padding < 0 or padding >= len(parameter)

    def share(taken: Tensor | None, slope: Tensor) -> Share:
        assert taken is not None
        return Looked(taken, slope, len(parameter), -1 if none else padding)

    return [Found(met[0].name, numbers.dim(), numbers.flatten(), share)]


def _add(node: Any, met: Sequence[Meeting]) -> list[Found] | None:
    """A parameter that is added to all examples alike."""
    if len(met) != 1 or met[0].turned or (met[0].place == 1 and node._saved_alpha != 1):
        return None
    return [_summed(met[0].name, met[0].parameter, 0)]


def _mul(node: Any, met: Sequence[Meeting]) -> list[Found] | None:
    """A parameter that all rows are multiplied with."""
    if len(met) != 1 or met[0].turned:
        return None
    place, name, parameter, _ = met[0]
    other = node._saved_other if place == 0 else node._saved_self
    axes = other.dim() - parameter.dim()
    if axes < 1 or other.shape[axes:] != parameter.shape:
        return None
    return [Found(name, axes, other.flatten(0, axes - 1), _times)]


_RULES: dict[str, Callable[[Any, Sequence[Meeting]], list[Found] | None]] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "ConvolutionBackward0": _convolution,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
    "EmbeddingBackward0": _embedding,
    "AddBackward0": _add,
    "ExpandBackward0": _add,
    "MulBackward0": _mul,
}
