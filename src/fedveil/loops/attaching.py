"""What the callbacks of all libraries share: a Guard that is attached while a training call runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.guard.attached import Attachment, check_alone, plain
from fedveil.guard.guard import Guard


class Attaching:
    """Makes the Guard of a model when its training first begins, and attaches it for as long as each training lasts."""

    def __init__(self, defense: Defense | Chain | Sequence[Defense] | str | None, options: Mapping[str, Any]) -> None:
        self.chain = Chain.of(defense)
        check_alone(self.chain)  # now, and not when the data has been loaded
        self._options = dict(options)
        self._made: Guard | None = None
        self._attached: Attachment | None = None
        self._state: Mapping[str, Any] | None = None

    @property
    def guard(self) -> Guard:
        """The Guard of the model that is trained; it lasts over training calls."""
        if self._made is None:
            raise FedveilError("there is no Guard yet: it is made when training begins")
        return self._made

    def begin(self, model: nn.Module, optimizers: Sequence[Any], *, processes: int = 1) -> None:
        """Attach: a training call begins."""
        if processes > 1:
            raise FedveilError(
                f"training runs in {processes} processes, each of which would draw noise of its own: use one process"
            )
        if len(optimizers) != 1:
            raise FedveilError(
                f"training uses {len(optimizers)} optimizers, and a gradient is protected as a whole: use one"
            )
        self.end()
        if self._made is None or self._made.model is not model:
            if self._made is not None:
                raise FedveilError("this callback guards another model: give each model a callback of its own")
            self._made = Guard(model, None, self.chain, **self._options)
        if self._state is not None:
            self._made.load_state_dict(self._state)
            self._state = None
        self._made.new_round()
        self._attached = self._made.attach(optimizers[0])

    def check(self, optimizer: Any) -> None:
        """Refuse a step of an optimizer that is not guarded: it came after training began."""
        if self._attached is None or not self._attached.active or self._attached.optimizer is not plain(optimizer):
            raise FedveilError("the optimizer was replaced after training began, and the new one is not guarded")

    def end(self) -> None:
        """Detach: a training call is over, or failed."""
        if self._attached is not None:
            self._attached.remove()
            self._attached = None

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps: above all, what was spent."""
        if self._made is None:
            return {} if self._state is None else self._state
        return self._made.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, when training begins."""
        self._state = dict(state) or None
