"""`ReceiveFilter`: remembers the model that a site receives, for the filter that protects what it sends back."""

from __future__ import annotations

from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from fedveil.clients.engine import Tensors
from fedveil.errors import FedveilError
from fedveil.nvflare.arrays import to_tensors

RECEIVED = "fedveil.received"


class ReceiveFilter(Filter):  # type: ignore[misc]  # NVFlare has no types
    """A filter of task data: keeps the weights of a received model until the site answers.

    With it, `ProtectFilter` knows what the server sent: it can protect the change of the weights where whole weights
    are sent, give back the server's own buffers, and refuse a result of another form.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Remember the model, if there is one in it, and let it through as it is."""
        fl_ctx.set_prop(RECEIVED, self._weights(shareable), private=True, sticky=False)
        return shareable

    def _weights(self, shareable: Shareable) -> Tensors | None:
        try:
            dxo = from_shareable(shareable)
        except Exception:  # what NVFlare raises here is not declared; a task need not carry a model
            return None
        if dxo.data_kind != DataKind.WEIGHTS or not dxo.data:
            return None
        try:
            return to_tensors(dxo.data)
        except FedveilError as error:
            raise ContentBlockedException(f"fedveil: the received model is not taken: {error}") from None
