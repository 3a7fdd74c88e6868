"""fedveil: train under a defense, attack what was shared, show what leaked and what it cost.

```python
import fedveil as fv

task = fv.task("digits", model="mlp", clients=4)
result = fv.audit(task, defense=fv.defenses.GradientDropout(keep=0.8), attack="inverting-gradients")
print(result.leakage)
result.report("report.html")
```

Names are loaded when they are first used: importing fedveil alone does not import torch.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any


def _homes() -> dict[str, str]:
    """The module of every public name, as the stub beside this file has it: there is no second list."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOMES = _homes()
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedveil' has no attribute '{name}'{_hint(name)}")
    home = _HOMES[name]
    if home == __name__:  # a namespace of methods
        value: Any = importlib.import_module(f"{home}.{name}")
    else:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Where the class of a method is, or what settings are called."""
    if not name[:1].isupper():
        return ""  # no class: `from fedveil import workers` asks here first, and all sources would be read
    homes = [f"{room}.{name}" for room in ("defenses", "attacks") if name in dir(__getattr__(room))]
    homes += [settings for settings in (f"{name}Settings",) if settings in _HOMES]
    return f": it is fedveil.{homes[0]}" if homes else ""


def __dir__() -> list[str]:
    return __all__
