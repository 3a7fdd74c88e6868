"""Attacking updates that were captured, by fedveil's own training or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.attacks.base import Attack
from fedveil.attacks.problem import LocalSteps, Reconstruction
from fedveil.attacks.tracking import Progress
from fedveil.auditing.attacking import Scene, problems_by_role, run_roles
from fedveil.auditing.result import Role
from fedveil.clients.engine import Backend, Loss
from fedveil.defenses.base import Facts
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, pseudo_gradient
from fedveil.registry import models
from fedveil.streams import Streams
from fedveil.tasks.from_files import FileModel
from fedveil.tasks.models.base import ModelSpec
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.own_files import Reference, is_reference
from fedveil.tree import Tree
from fedveil.workers import Workers

T = TypeVar("T")


@dataclass(frozen=True)
class CaptureSetting:
    """What the attacker supposes about captured updates beyond the files themselves.

    Everything that fedveil's own captures carry in `facts` may be left out; for an update captured elsewhere give at
    least the model and the shape of an input.
    """

    model: nn.Module | None = None
    loss: Loss = functional.cross_entropy
    shape: tuple[int, ...] | None = None
    normalization: Normalization | None = None
    classes: int | None = None
    defense: Chain | str | None = None  # what the adaptive attacker knows
    unroll: bool = True  # repeat the local steps behind a FedAvg update


def attack_captures(
    captures: Sequence[Capture],
    attack: Attack,
    *,
    setting: CaptureSetting | None = None,
    labels: Tensor | None = None,
    seed: int = 0,
    backend: Backend = "auto",
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> dict[Role, Reconstruction]:
    """Reconstruct the batches behind captured updates: naive, adaptive (if a defense is known) and the noise floor.

    captures: of one model and one kind of message, with equal batch sizes.
    labels: (captures, examples) where the attacker is told; else the attack must find them.
    """
    setting = setting or CaptureSetting()
    model = check_captures(captures, setting)
    first = captures[0]
    facts = first.facts
    shape = _shape(first, setting)
    examples = examples_of(first)
    local = None
    if first.kind != "gradient" and setting.unroll and first.steps > 1:
        local = LocalSteps(
            steps=first.steps,
            batch_size=first.batch_sizes[0],
            lr=first.lr[0],
            momentum=first.momentum,
            weight_decay=float(facts.get("weight_decay") or 0.0),
        )
    named = _chain(first, setting)
    scene = Scene(
        model=model,
        loss=setting.loss,
        params=Tree.stack([capture.before for capture in captures]),
        buffers=_buffers(captures, model),
        shape=shape,
        batch_size=examples,
        classes=setting.classes or facts.get("classes"),
        normalization=pixel_map(first, setting),
        facts=Facts(kind=first.kind, batch_size=examples, steps=first.steps, lr=first.lr[0], momentum=first.momentum),
        streams=Streams.seeded(seed, range(len(captures)), "attack"),
        labels=labels,
        local=local,
    )
    observed = Tree.stack([pseudo_gradient(capture) for capture in captures])
    problems = problems_by_role(scene, named, defended=observed, undefended=None if named.defenses else observed)
    return run_roles(attack, problems, backend=backend, progress=progress, workers=workers)


def check_captures(captures: Sequence[Capture], setting: CaptureSetting) -> nn.Module:
    """Refuse what cannot be attacked together or does not fit the model, before long work; returns the model."""
    if not captures:
        raise FedveilError("there is no captured update to attack")
    _check_alike(captures)
    model = setting.model if setting.model is not None else named_model(captures[0])
    for capture in captures:
        capture.check(model)
        examples_of(capture)
    pixel_map(captures[0], setting)
    _chain(captures[0], setting).check_message(captures[0].kind)
    return model


def examples_of(capture: Capture) -> int:
    """How many examples are behind an update; local epochs see the same ones again."""
    return sum(capture.batch_sizes[: _steps_per_epoch(capture, capture.facts)])


def pixel_map(capture: Capture, setting: CaptureSetting) -> Normalization:
    """The normalization that the attacker supposes; where none is stated, inputs are pixels between 0 and 1."""
    return setting.normalization or _normalization(capture.facts, _shape(capture, setting))


def _shape(capture: Capture, setting: CaptureSetting) -> tuple[int, ...]:
    return setting.shape or _fact(capture.facts, "shape", _lengths, "the shape of an input (--shape 1,28,28)")


def _chain(capture: Capture, setting: CaptureSetting) -> Chain:
    """The defense that the attacker supposes, or what the capture says of it."""
    given = setting.defense if setting.defense is not None else capture.facts.get("defense")
    if not isinstance(given, Chain | str | None):
        raise FedveilError(f"the capture's defense is not usable: {given!r:.80}; give it (--defense)")
    chain = Chain.of(given)
    return Chain(tuple(defense for defense in chain.defenses if defense.name != "none"))


def _check_alike(captures: Sequence[Capture]) -> None:
    first = captures[0]
    for capture in captures[1:]:
        for name in ("kind", "steps", "lr", "momentum", "batch_sizes"):
            if getattr(capture, name) != getattr(first, name):
                raise FedveilError(
                    f"captures attacked together must agree in {name}: {getattr(first, name)} and "
                    f"{getattr(capture, name)}; attack them one by one"
                )


def named_model(capture: Capture, file: str | None = None) -> nn.Module:
    """The model that a capture of fedveil's own names, or that of a Python file which the user names.

    What a capture says runs no file: it may come from anybody.
    """
    facts = capture.facts
    described = facts.get("model")
    spec: ModelSpec | FileModel
    if file is not None:
        spec = FileModel(Reference.read(file))
    elif isinstance(described, str) and is_reference(described):
        raise FedveilError(f"the capture's model is out of a Python file, {described}: give that file with --model")
    elif isinstance(described, str):
        spec = models.parse(described)
    elif isinstance(described, dict) and isinstance(described.get("name"), str):
        spec = models.build(**described)
    else:
        raise FedveilError("the capture does not name its model: give it (--model lenet), or model= in Python")
    assert isinstance(spec, ModelSpec | FileModel)
    shape = _fact(facts, "shape", _lengths, "the shape of an input (--shape 1,28,28)")
    classes = _fact(facts, "classes", _length, "the number of classes (--classes 10)")
    try:
        # First without memory: what a file says of its model need not fit what it holds.
        with torch.device("meta"):
            outline = spec.build(shape, classes)
        capture.check(outline)
        return spec.build(shape, classes)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise FedveilError(f"the capture's model cannot be built: {reason}; give it (--model lenet)") from None


def _fact(facts: dict[str, Any], name: str, read: Callable[[Any], T], what: str) -> T:
    if facts.get(name) is None:
        raise FedveilError(f"the capture does not tell {what}: give it")
    try:
        return read(facts[name])
    except (TypeError, ValueError, OverflowError):
        raise FedveilError(f"the capture's {name} is not usable: {facts[name]!r:.80}; give {what}") from None


def _length(value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError
    return value


def _lengths(value: Any) -> tuple[int, ...]:
    return tuple(_length(each) for each in _listed(value))


def _numbers(value: Any) -> tuple[float, ...]:
    if not all(type(each) in (int, float) for each in _listed(value)):
        raise ValueError
    return tuple(float(each) for each in value)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError
    return list(value)


def _steps_per_epoch(capture: Capture, facts: dict[str, Any]) -> int:
    told = facts.get("local_epochs") is not None
    epochs = _fact(facts, "local_epochs", _length, "the number of local epochs") if told else 1
    return max(capture.steps // epochs, 1)


def _buffers(captures: Sequence[Capture], model: nn.Module) -> Tree:
    own = {name: buffer.detach() for name, buffer in model.named_buffers()}
    return Tree.stack([{**own, **(capture.buffers_before or {})} for capture in captures])


def _normalization(facts: dict[str, Any], shape: tuple[int, ...]) -> Normalization:
    """The stated normalization; without one, pixels between 0 and 1."""
    mean, std = facts.get("mean"), facts.get("std")
    if mean is None or std is None:
        return Normalization((0.0,) * shape[0], (1.0,) * shape[0])
    what = "a mean and a standard deviation per channel"
    return Normalization(_fact(facts, "mean", _numbers, what), _fact(facts, "std", _numbers, what))


def truth_labels(targets: Sequence[Tensor], captures: Sequence[Capture]) -> Tensor:
    """The labels of every capture's examples as the attack takes them: (captures, examples)."""
    return torch.stack([labels[: examples_of(each)] for labels, each in zip(targets, captures, strict=True)])
