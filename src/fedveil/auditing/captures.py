"""Attacking updates that were captured, by fedveil's own training or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from fedveil.tasks.models.base import ModelSpec
from fedveil.tasks.normalization import Normalization
from fedveil.tree import Tree


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
        facts=Facts(kind=first.kind, batch_size=examples, steps=first.steps, lr=first.lr[0]),
        streams=Streams.seeded(seed, range(len(captures)), "attack"),
        labels=labels,
        local=local,
    )
    observed = Tree.stack([pseudo_gradient(capture) for capture in captures])
    problems = problems_by_role(scene, named, defended=observed, undefended=None if named.defenses else observed)
    return run_roles(attack, problems, backend=backend, progress=progress)


def check_captures(captures: Sequence[Capture], setting: CaptureSetting) -> nn.Module:
    """Refuse what cannot be attacked together or does not fit the model, before long work; returns the model."""
    if not captures:
        raise FedveilError("there is no captured update to attack")
    _check_alike(captures)
    model = setting.model if setting.model is not None else _model(captures[0].facts)
    for capture in captures:
        capture.check(model)
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
    found = setting.shape or _fact(capture.facts, "shape", tuple, "the shape of an input (--shape 1,28,28)")
    return tuple(int(length) for length in found)


def _chain(capture: Capture, setting: CaptureSetting) -> Chain:
    """The defense that the attacker supposes, or what the capture says of it."""
    given = setting.defense if setting.defense is not None else capture.facts.get("defense")
    if not isinstance(given, Chain | str | None):
        raise FedveilError(f"the capture's defense is not usable: {given!r}; give it (--defense)")
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


def _model(facts: dict[str, Any]) -> nn.Module:
    """The model that a capture of fedveil's own names."""
    described = facts.get("model")
    if not isinstance(described, str | dict):
        raise FedveilError("the capture does not name its model: give it (--model lenet), or model= in Python")
    spec = models.parse(described) if isinstance(described, str) else models.build(**described)
    assert isinstance(spec, ModelSpec)
    shape = _fact(facts, "shape", tuple, "the shape of an input (--shape 1,28,28)")
    return spec.build(shape, int(_fact(facts, "classes", int, "the number of classes (--classes 10)")))


def _fact(facts: dict[str, Any], name: str, kind: type, what: str) -> Any:
    if facts.get(name) is None:
        raise FedveilError(f"the capture does not tell {what}: give it")
    try:
        return kind(facts[name])
    except (TypeError, ValueError):
        raise FedveilError(f"the capture's {name} is not usable: {facts[name]!r}; give {what}") from None


def _steps_per_epoch(capture: Capture, facts: dict[str, Any]) -> int:
    epochs = int(facts.get("local_epochs") or 1)
    return max(capture.steps // epochs, 1)


def _buffers(captures: Sequence[Capture], model: nn.Module) -> Tree:
    own = {name: buffer.detach() for name, buffer in model.named_buffers()}
    return Tree.stack([{**own, **(capture.buffers_before or {})} for capture in captures])


def _normalization(facts: dict[str, Any], shape: tuple[int, ...]) -> Normalization:
    """The stated normalization; without one, pixels between 0 and 1."""
    mean, std = facts.get("mean"), facts.get("std")
    if mean is None or std is None:
        return Normalization((0.0,) * shape[0], (1.0,) * shape[0])
    return Normalization(tuple(mean), tuple(std))


def truth_labels(targets: Sequence[Tensor], captures: Sequence[Capture]) -> Tensor:
    """The labels of every capture's examples as the attack takes them: (captures, examples)."""
    return torch.stack([labels[: examples_of(each)] for labels, each in zip(targets, captures, strict=True)])
