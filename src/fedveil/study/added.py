"""Defenses of one's own for a leaderboard: a Python file that registers them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from fedveil.errors import FedveilError, one_line
from fedveil.registry import defenses


def add_file(path: Path) -> list[str]:
    """Run a Python file, and return the names of the defenses that it registered."""
    if not path.is_file():
        raise FedveilError(f"there is no file {path}: --add takes a Python file that registers a defense")
    name = f"added_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FedveilError(f"{path} is no Python file: --add takes one that registers a defense")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FedveilError:
        raise
    except Exception as error:  # whatever the user's own file raises
        raise FedveilError(f"{path}: {one_line(error)}") from None
    added = [each for each, entry in defenses.entries().items() if entry.target.partition(":")[0] == name]
    if not added:
        raise FedveilError(f'{path} registers no defense: put @defenses.register("name") above its class')
    return added
