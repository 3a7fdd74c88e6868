"""A defense in a skorch net: one callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.guard.guard import Guard
from fedveil.loops.attaching import Attaching

try:
    from skorch.callbacks import Callback
except ImportError:
    raise FedveilError("skorch is not installed: pip install 'fedveil[skorch]'") from None


class GuardCallback(Callback):  # type: ignore[misc]  # skorch has no types
    """Protects the gradient of every optimizer step, after accumulation and clipping.

    ```python
    from fedveil.loops.skorch import GuardCallback

    net = skorch.NeuralNetClassifier(module, callbacks=[("guard", GuardCallback("gradient-dropout"))])
    net.fit(x, y)
    print(dict(net.callbacks_)["guard"].guard.spent().sentence)
    ```

    `settings` are the keywords of `fedveil.Guard`. A net that is fitted anew has a new model and a Guard of its own;
    `partial_fit` goes on with the old one.
    """

    def __init__(
        self, defense: Defense | Chain | Sequence[Defense] | str | None, settings: dict[str, Any] | None = None
    ) -> None:
        self.defense = defense
        self.settings = settings

    def initialize(self) -> GuardCallback:
        """A net was made or made anew."""
        self._guarding = Attaching(self.defense, self.settings or {})
        return self

    @property
    def guard(self) -> Guard:
        """The Guard of the module; there is one from the start of training on."""
        return self._guarding.guard

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **others: Any) -> None:
        """Attach to the optimizer."""
        names = list(net._modules)
        if len(names) != 1:
            raise FedveilError(f"the net has the modules {', '.join(names)}: GuardCallback protects nets with one")
        self._guarding.begin(getattr(net, names[0] + "_"), [getattr(net, name + "_") for name in net._optimizers])

    def on_grad_computed(self, net: Any, named_parameters: Any, **others: Any) -> None:
        """Refuse a step of an optimizer that is not guarded."""
        self._guarding.check(getattr(net, net._optimizers[0] + "_"))

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **others: Any) -> None:
        """Detach."""
        self._guarding.end()
