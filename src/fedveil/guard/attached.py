"""A defense just before an optimizer's step, for training loops that call `loss.backward()` themselves.

`Guard.attach` is the front. An optimizer calls its hook at the start of `step`, when the gradients of all micro-batches
are summed and clipped, and a `GradScaler` has unscaled them. An error there stops the step: nothing moves unprotected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedveil.defenses.base import owns_step
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.intake import Intake
from fedveil.tree import Tree


class Attachment:
    """A defense that acts whenever an optimizer is about to step, until `remove`, or the end of a `with` block."""

    def __init__(self, optimizer: Optimizer, act: Callable[[], None]) -> None:
        self.optimizer = plain(optimizer)
        self._act = act
        self._handle = self.optimizer.register_step_pre_hook(self._before_step)
        self.active = True

    def remove(self) -> None:
        """Leave the optimizer as it was: its further steps are not protected."""
        self._handle.remove()
        self.active = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Protect the gradients that the step will use: those at hand, or those that its closure will compute."""
        if not self.active:  # removed within this very step
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._protect()
            return None

        def protected() -> Any:
            loss = closure()
            self._protect()
            return loss

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], protected, *args[2:]), rest

    def _protect(self) -> None:
        if getattr(self.optimizer, "grad_scale", None) is not None:
            raise FedveilError(
                "this optimizer would unscale the gradients inside its step, after the defense: call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        overflowed = getattr(self.optimizer, "found_inf", None)
        if overflowed is not None and bool(overflowed):
            return  # the optimizer skips this step by itself
        with torch.no_grad():
            self._act()


def plain(optimizer: Any) -> Optimizer:
    """The optimizer of torch inside the wrappers of training libraries."""
    found = optimizer
    while isinstance(getattr(found, "optimizer", None), Optimizer):
        found = found.optimizer
    if not isinstance(found, Optimizer):
        raise FedveilError(f"attach takes an optimizer of torch, not {type(optimizer).__name__}")
    return found


def check_alone(chain: Chain) -> None:
    """Refuse a chain that cannot protect a gradient where only that gradient is at hand."""
    for defense in chain.defenses:
        if owns_step(defense) or defense.acts_at in ("sample", "data") or defense.needs & {"batch", "validation"}:
            raise FedveilError(
                f"{defense.name} needs the data behind a gradient, and an optimizer has only the gradient: call "
                "guard.backward(inputs, targets) in place of loss.backward()"
            )


def check_holds(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer that moves other parameters than those that the defense protects together."""
    own = {id(parameter): name for name, parameter in trained.items()}
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for number, name in own.items() if number not in held]
    if missing:
        raise FedveilError(
            f"the optimizer does not hold {missing[0]} of the model, and a gradient is protected as a whole: add it, "
            "freeze it with requires_grad_(False), or guard each part of the model by a Guard of its own"
        )
    if any(number not in own and (p.requires_grad or p.grad is not None) for number, p in held.items()):
        raise FedveilError(
            "the optimizer holds parameters that are not in the guarded model: their gradients would go unprotected; "
            "give Guard a model that has them all"
        )


def gradient_of(trained: Mapping[str, nn.Parameter]) -> Tree | None:
    """What `.grad` holds, zero where the pass left none; None where nothing has a gradient, for then nothing moves."""
    if all(parameter.grad is None for parameter in trained.values()):
        return None
    found = {}
    for name, parameter in trained.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if type(gradient) not in (Tensor, nn.Parameter) or gradient.layout is not torch.strided:
            raise FedveilError(
                f"the gradient of {name} is sparse or spread over processes: attach protects plain tensors only"
            )
        found[name] = gradient.detach().clone()  # of its own: what a defense or a capture keeps must not move with it
    wrong = Intake(trained).refuse(found)
    if wrong:
        raise FedveilError(f"the gradient {wrong}: check the data and the loss; the optimizer did not step")
    return Tree({name: tensor[None] for name, tensor in found.items()})


def put(update: Mapping[str, Tensor], trained: Mapping[str, nn.Parameter]) -> None:
    """Write a protected gradient where the optimizer reads it, in place where there is a place."""
    for name, parameter in trained.items():
        if parameter.grad is None:
            parameter.grad = update[name].clone()
        else:
            parameter.grad.copy_(update[name])
