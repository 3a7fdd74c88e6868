"""Captured updates before they are attacked: whether they fit together, their model, and what is said of them."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.clients.engine import Loss
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError, one_line
from fedveil.federation.capture import Capture, pseudo_gradient
from fedveil.federation.facts import PublicFacts
from fedveil.registry import models
from fedveil.tasks.from_files import FileModel
from fedveil.tasks.models.base import ModelSpec
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.own_files import Reference, is_reference

ALIKE = ("kind", "steps", "lr", "momentum", "batch_sizes")  # in which captures of one attack must agree
WAY_THROUGH = 256  # numbers that a model keeps on the way for one number of its input, at the least


@dataclass(frozen=True)
class CaptureSetting:
    """What the attacker supposes about captured updates beyond the files themselves.

    Everything that fedveil's own captures carry in `facts` may be left out; for an update captured elsewhere give at
    least the model and the shape of an input.
    """

    model: nn.Module | str | None = None  # a module, or as the command line names it
    loss: Loss = functional.cross_entropy
    shape: tuple[int, ...] | None = None
    normalization: Normalization | None = None
    classes: int | None = None
    defense: Chain | None = None  # what the adaptive attacker knows; None: what the capture says


@dataclass(frozen=True, eq=False)
class Attackable:
    """What is known once captures were found to fit together and to fit their model."""

    model: nn.Module
    model_name: str
    shape: tuple[int, ...]  # of one input
    classes: int | None  # None where the model's output is not one score per class
    normalization: Normalization
    chain: Chain  # as stated
    stated: bool  # whether anybody says which defense there is, or that there is none


def check_captures(captures: Sequence[Capture], setting: CaptureSetting) -> Attackable:
    """Refuse what cannot be attacked together or does not fit the model, before any long work."""
    _check_alike(captures)
    first = captures[0]
    _check_loss(first, setting)
    model, name = _model(first, setting)
    shape = _shape(first, setting)
    if len(shape) != 3:
        raise FedveilError(f"an attack reconstructs images of shape (channels, height, width), not inputs of {shape}")
    _check_memory(captures, shape)
    check_updates(captures, model)
    normalization = pixel_map(first, setting)
    if normalization.channels != shape[0]:
        raise FedveilError(f"the normalization is of {normalization.channels} channels, an input's shape is {shape}")
    chain, stated = stated_chain(first, setting)
    return Attackable(model, name, shape, _classes(model, shape, first, setting), normalization, chain, stated)


def check_updates(captures: Sequence[Capture], model: nn.Module) -> None:
    """Refuse captures that do not agree, or do not fit the model."""
    _check_alike(captures)
    for capture in captures:
        capture.check(model)
        _check_gradient(capture)


def stated_chain(first: Capture, setting: CaptureSetting) -> tuple[Chain, bool]:
    """The defense that is stated, and whether anybody states one."""
    told = first.public.defense
    chain = setting.defense if setting.defense is not None else Chain.of(told)
    chain.check_message(first.kind)
    return chain, setting.defense is not None or told is not None


# ---- the updates ---------------------------------------------------------------------------------------------


def examples_of(capture: Capture) -> int:
    """How many examples are behind an update; local epochs see the same ones again."""
    return sum(_epoch(capture))


def epochs_alike(capture: Capture) -> bool:
    """Whether every local epoch has as many examples, which may come in batches of any sizes and rates."""
    length = len(_epoch(capture))
    starts = range(0, capture.steps, length)
    return len({sum(capture.batch_sizes[start : start + length]) for start in starts}) == 1


def _epoch(capture: Capture) -> tuple[int, ...]:
    """The batch sizes of a local epoch."""
    return capture.batch_sizes[: capture.steps // (capture.public.local_epochs or 1)]


def _check_alike(captures: Sequence[Capture]) -> None:
    if not captures:
        raise FedveilError("there is no captured update to attack")
    first, facts = captures[0], captures[0].public
    for capture in captures[1:]:
        told = capture.public
        pairs = [(name, getattr(first, name), getattr(capture, name)) for name in ALIKE]
        pairs += [(name, getattr(facts, name), getattr(told, name)) for name in PublicFacts.model_fields]
        for name, one, other in pairs:
            if one != other:
                raise FedveilError(
                    f"captures attacked together must agree in {name}: {_words(one):.80} and {_words(other):.80}; "
                    "attack them one by one"
                )


def _words(value: object) -> str:
    """A long row of equal values, such as batch sizes, is told by their number."""
    if not isinstance(value, tuple) or len(value) < 5:
        return str(value)
    runs = [(each, len(list(same))) for each, same in groupby(value)]
    return ", ".join(f"{count} × {each}" if count > 1 else str(each) for each, count in runs)


def _check_gradient(capture: Capture) -> None:
    for name, tensor in pseudo_gradient(capture).items():
        if not bool(torch.isfinite(tensor).all()):
            raise FedveilError(f"the gradient behind {name} is not finite: the learning rates of the capture are wrong")


def _check_memory(captures: Sequence[Capture], shape: tuple[int, ...]) -> None:
    """The least that an attack holds: for three roles the candidates, their gradient and two moments of it.

    And one example's way through the model, which takes its time and memory too when it is checked.
    """
    needed = max(len(captures) * examples_of(captures[0]) * 3 * 4, WAY_THROUGH) * math.prod(shape) * 4
    memory = physical_memory()
    if memory is not None and needed > memory:
        raise FedveilError(
            f"an attack on {len(captures):,} x {examples_of(captures[0]):,} examples of shape {shape} needs "
            f"{needed / 2**30:,.1f} GiB or more, and this machine has {memory / 2**30:,.1f}: attack fewer captures at "
            "once, if their batch sizes and shape are right"
        )


def physical_memory() -> int | None:
    """The machine's memory in bytes, where the system tells it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


# ---- what is known of inputs and model -----------------------------------------------------------------------


def pixel_map(capture: Capture, setting: CaptureSetting) -> Normalization:
    """The normalization that the attacker supposes; where none is stated, inputs are pixels between 0 and 1."""
    facts = capture.public
    if setting.normalization is not None:
        return setting.normalization
    if facts.mean is not None and facts.std is not None:
        return Normalization(tuple(facts.mean), tuple(facts.std))
    channels = _shape(capture, setting)[0]
    return Normalization((0.0,) * channels, (1.0,) * channels)


def _shape(capture: Capture, setting: CaptureSetting) -> tuple[int, ...]:
    shape = setting.shape or capture.public.shape
    if not shape:
        raise FedveilError(
            "the capture does not tell the shape of an input: give it (--shape 1,28,28, or shape=(1, 28, 28) in Python)"
        )
    return tuple(shape)


def _check_loss(capture: Capture, setting: CaptureSetting) -> None:
    told = capture.public.loss
    if setting.loss is functional.cross_entropy and told not in (None, "cross_entropy", "CrossEntropyLoss"):
        raise FedveilError(
            f"the update was made under the loss '{told:.80}', not cross-entropy: give it (loss= of fedveil.attack)"
        )


def _classes(model: nn.Module, shape: tuple[int, ...], first: Capture, setting: CaptureSetting) -> int | None:
    """The model's scores per input, after one input has gone through it: what is wrong with its shape shows here."""
    try:
        with torch.no_grad():
            probed = copy.deepcopy(model).eval()
            given = torch.zeros(1, *shape, dtype=next(iter(first.before.values())).dtype)
            output = probed(given)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        reason = one_line(error)
        raise FedveilError(
            f"the model {type(model).__name__} does not take inputs of shape {shape}: {reason}"
        ) from None
    told = setting.classes or first.public.classes
    if not isinstance(output, Tensor) or output.dim() != 2:
        return told
    if told not in (None, output.shape[1]):
        raise FedveilError(f"the model {type(model).__name__} tells {output.shape[1]} classes apart, not {told}")
    return output.shape[1]


def _model(capture: Capture, setting: CaptureSetting) -> tuple[nn.Module, str]:
    """The model, and what a reader knows it by.

    What a capture says runs no file: it may come from anybody. What the user says does.
    """
    given, described = setting.model, capture.public.model
    spec: ModelSpec | FileModel
    if isinstance(given, nn.Module):
        return given, type(given).__name__
    if given is not None:
        spec = FileModel(Reference.read(given)) if is_reference(given) else models.parse(given)
    elif isinstance(described, str) and is_reference(described):
        raise FedveilError(f"the capture's model is out of a Python file, {described}: give that file with --model")
    elif isinstance(described, str):
        spec = models.parse(described)
    elif isinstance(described, dict) and isinstance(described.get("name"), str):
        spec = models.build(**described)
    else:
        raise FedveilError("the capture does not name its model: give it (--model lenet), or model= in Python")
    shape, classes = _shape(capture, setting), setting.classes or capture.public.classes
    if classes is None:
        raise FedveilError("the capture does not tell the number of classes: give it (--classes 10)")
    return _built(spec, shape, classes, capture), spec.name


def _built(spec: ModelSpec | FileModel, shape: tuple[int, ...], classes: int, capture: Capture) -> nn.Module:
    try:
        # First without memory: what a file says of its model need not fit what it holds.
        with torch.device("meta"):
            outline = spec.build(shape, classes)
        capture.check(outline)
        return spec.build(shape, classes)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        reason = one_line(error)
        raise FedveilError(f"the capture's model cannot be built: {reason}; give it (--model lenet)") from None
