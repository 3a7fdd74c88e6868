"""Defenses: one module per method. A method's class is `fedveil.defenses.CLASS`, imported when it is first used.

The registry knows the names from the sources; `__init__.pyi` beside this file tells them to type checkers.
"""

from __future__ import annotations

from typing import Any

from fedveil.registry import defenses as _registry


def __getattr__(name: str) -> Any:
    return _registry.class_named(name)


def __dir__() -> list[str]:
    return _registry.class_names()
