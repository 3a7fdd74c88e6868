"""`ReceiveFilter`: looks at the model that a site receives, and remembers it for the filter of what it sends back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.errors import FedveilError
from fedveil.nvflare.arrays import to_tensors
from fedveil.vetting.received import inspect_model

RECEIVED = "fedveil.received"


class ReceiveFilter(Filter):  # type: ignore[misc]  # NVFlare has no types
    """A filter of task data: refuses a model that looks malicious, and keeps its weights until the site answers.

    With it, `ProtectFilter` knows what the server sent: it can protect the change of the weights where whole weights
    are sent, give back the server's own buffers, and refuse a result of another form.

    - `suspicious`: what to do with a model in which `fedveil.inspect_model` finds signs of a malicious server: "refuse"
      blocks the task, "log" writes the signs to the site's log, "ignore" does not look.
    """

    def __init__(self, suspicious: Literal["refuse", "log", "ignore"] = "refuse") -> None:
        super().__init__()
        if suspicious not in ("refuse", "log", "ignore"):
            raise FedveilError(f"suspicious is 'refuse', 'log' or 'ignore', not {suspicious!r:.40}")
        self.suspicious = suspicious
        self._last: Tensors | None = None

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Look at the model, if there is one in it, remember it, and let the task through as it is."""
        try:
            weights = self._weights(shareable, fl_ctx)
            if weights is not None and self.suspicious != "ignore":
                self._inspect(weights, fl_ctx)
        except FedveilError as error:
            raise ContentBlockedException(f"fedveil: {error}") from None
        fl_ctx.set_prop(RECEIVED, weights, private=True, sticky=False)
        return shareable

    def _inspect(self, weights: Tensors, fl_ctx: FLContext) -> None:
        found = inspect_model(weights, self._last)
        if self.suspicious == "refuse":
            found.require()
        for sign in found.signs:
            self.log_warning(fl_ctx, f"fedveil: the received model: {sign}")
        self._last = weights

    def _weights(self, shareable: Shareable, fl_ctx: FLContext) -> Tensors | None:
        try:
            dxo = from_shareable(shareable)
        except Exception:  # what NVFlare raises here is not declared; a task need not carry a model
            return None
        if dxo.data_kind == DataKind.WEIGHTS and dxo.data:
            return to_tensors(dxo.data)
        if dxo.data_kind != DataKind.METRICS and _holds_arrays(dxo.data) and self.suspicious != "ignore":
            # NVFlare's client API hands arrays of any kind to a script as its model.
            told = f"the task brings arrays as {str(dxo.data_kind)!r:.40}, in which a model cannot be inspected"
            if self.suspicious == "refuse":
                raise FedveilError(told)
            self.log_warning(fl_ctx, f"fedveil: {told}")
        return None


def _holds_arrays(data: Any) -> bool:
    return isinstance(data, Mapping) and any(isinstance(value, np.ndarray | Tensor) for value in data.values())
