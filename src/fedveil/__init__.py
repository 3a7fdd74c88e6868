"""fedveil: train under a defense, attack what was shared, show what leaked and what it cost."""

from fedveil.version import __version__

__all__ = ["__version__"]
