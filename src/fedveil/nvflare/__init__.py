"""fedveil's defenses in NVFlare: filters for what a site sends and receives."""

try:
    import nvflare.apis.filter  # noqa: F401
except ImportError:
    from fedveil.errors import FedveilError

    raise FedveilError("NVFlare is not installed: pip install 'fedveil[nvflare]'") from None

from fedveil.nvflare.protect_filter import ProtectFilter
from fedveil.nvflare.receive_filter import ReceiveFilter

__all__ = ["ProtectFilter", "ReceiveFilter"]
