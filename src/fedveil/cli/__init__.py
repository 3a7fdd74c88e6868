"""The command line. Torch is imported inside the commands that need it, so that help and lists appear at once."""

from __future__ import annotations

from fedveil.cli.main import main

__all__ = ["main"]
