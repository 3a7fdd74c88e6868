"""The command line, as the journeys have it."""

from __future__ import annotations

from journeys.console import fedveil

__all__ = ["fedveil"]
