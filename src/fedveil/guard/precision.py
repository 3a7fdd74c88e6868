"""The precision that a training loop of someone's own has set, and what a scaler makes of numbers beyond it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from fedveil.clients.engine import Engine
from fedveil.errors import FedveilError
from fedveil.intake import Intake, too_long
from fedveil.tree import Tree


@contextmanager
def callers_precision(engine: Engine, device: str, scaler: torch.amp.GradScaler | None) -> Iterator[None]:
    """Have the model's passes run in the precision that the caller set, and all else in full precision."""
    engine.loss_scale = scaler.get_scale() if scaler is not None else 1.0
    if not torch.is_autocast_enabled(device):
        yield
        return
    dtype = torch.get_autocast_dtype(device)
    if dtype == torch.float16 and scaler is None:
        raise FedveilError(
            "autocast to float16 needs a GradScaler, and Guard must know it: Guard(..., scaler=scaler), with "
            "GradScaler(enabled=False) for none; autocast to bfloat16 needs no scaler"
        )
    # No cache: it would keep weights that a defense or the optimizer has moved since.
    engine.precision = lambda: torch.autocast(device, dtype, cache_enabled=False)
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        engine.precision = nullcontext


def sound(
    what: str, update: Tree, like: Mapping[str, Tensor] | None, loss: Tensor | None, scaler: torch.amp.GradScaler | None
) -> bool:
    """Whether a server would take an update. If not, a scaler skips the step; without a scaler this is an error.

    like: names, shapes and types that it must have; None where they are right.
    """
    wrong = too_long(update.row(0)) if like is None else Intake(like).refused(update).get(0)
    if loss is not None and not math.isfinite(loss.item()):
        what, wrong = "the loss", "is not finite (NaN or infinity)"
    if wrong and not (scaler is not None and scaler.is_enabled()):
        raise FedveilError(f"{what} {wrong}: check the data and the loss")
    return not wrong
