"""A defense in the `Trainer` of Hugging Face transformers: one callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.guard.guard import Guard
from fedveil.loops.attaching import Attaching

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError:
    raise FedveilError("transformers is not installed: pip install 'fedveil[huggingface]'") from None


class GuardCallback(TrainerCallback, ExportableState):
    """Protects the gradient of every optimizer step, after accumulation, unscaling and clipping.

    ```python
    from fedveil.loops.huggingface import GuardCallback

    protect = GuardCallback("clip:norm=1+gaussian-noise:sigma=0.01")
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[protect]).train()
    print(protect.guard.spent().sentence)
    ```

    Further keywords are those of `fedveil.Guard`. What was spent is kept in the Trainer's checkpoints.
    """

    def __init__(self, defense: Defense | Chain | Sequence[Defense] | str | None, **guard: Any) -> None:
        self._guarding = Attaching(defense, guard)

    @property
    def guard(self) -> Guard:
        """The Guard of the model; there is one from the start of training on."""
        return self._guarding.guard

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the optimizer; after a checkpoint was loaded, go on from what had been spent by then."""
        if state.global_step:
            kept: Any = state.stateful_callbacks  # by the name of their class, once they are in a checkpoint
            own = kept.get(type(self).__name__) if kept else None
            if not own:
                raise FedveilError(
                    "the checkpoint does not say what was spent before: it was written without this callback"
                )
            self._guarding.load(own["attributes"]["kept"])
        self._guarding.begin(kwargs["model"], [kwargs["optimizer"]], processes=args.world_size)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a step of an optimizer that is not guarded."""
        self._guarding.check(kwargs["optimizer"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach."""
        self._guarding.end()

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint, which is JSON."""
        kept = self._guarding.state()
        if any(kept.get("states", ())):
            raise FedveilError(f"{self._guarding.chain} remembers tensors over rounds: a checkpoint cannot hold them")
        return {"args": {}, "attributes": {"kept": dict(kept)}}
