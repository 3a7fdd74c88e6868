"""A defense in a Lightning `Trainer`: one callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.guard.guard import Guard
from fedveil.loops.attaching import Attaching

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    raise FedveilError("Lightning is not installed: pip install 'fedveil[lightning]'") from None


class GuardCallback(Callback):
    """Protects the gradient of every optimizer step, after accumulation, unscaling and clipping.

    ```python
    from fedveil.loops.lightning import GuardCallback

    protect = GuardCallback("clip:norm=1+gaussian-noise:sigma=0.01")
    lightning.Trainer(callbacks=[protect]).fit(module, loader)
    print(protect.guard.spent().sentence)
    ```

    Further keywords are those of `fedveil.Guard`. What was spent is kept in Lightning's checkpoints.
    """

    def __init__(self, defense: Defense | Chain | Sequence[Defense] | str | None, **guard: Any) -> None:
        self._guarding = Attaching(defense, guard)

    @property
    def guard(self) -> Guard:
        """The Guard of the module; there is one from the start of training on."""
        return self._guarding.guard

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizer."""
        self._guarding.begin(pl_module, trainer.optimizers, processes=trainer.world_size)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Refuse a step of an optimizer that is not guarded."""
        self._guarding.check(optimizer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach."""
        self._guarding.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach."""
        self._guarding.end()

    def state_dict(self) -> dict[str, Any]:
        """What goes into a checkpoint."""
        return dict(self._guarding.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._guarding.load(state_dict)
