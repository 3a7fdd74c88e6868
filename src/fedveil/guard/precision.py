"""The precision that a training loop of someone's own has set: half precision for its passes, full for all else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from fedveil.clients.engine import Engine
from fedveil.errors import FedveilError


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
