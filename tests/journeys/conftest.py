"""The command line for journeys."""

from __future__ import annotations

from .console import fedveil

__all__ = ["fedveil"]
