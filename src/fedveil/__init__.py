"""fedveil: train under a defense, attack what was shared, show what leaked and what it cost.

```python
import fedveil as fv

task = fv.task("digits", model="mlp", clients=4)
result = fv.audit(task, defense=fv.GradientDropout(keep=0.8), attack="inverting-gradients")
print(result.leakage)
result.report("report.html")
```

Names are loaded when they are first used: importing fedveil alone does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedveil.errors import FedveilError
from fedveil.version import __version__

if TYPE_CHECKING:
    from fedveil.attacks.dlg import DLG
    from fedveil.attacks.idlg import IDLG
    from fedveil.attacks.inverting_gradients import InvertingGradients
    from fedveil.auditing.run import audit
    from fedveil.auditing.settings import Audit
    from fedveil.defenses.base import Defense
    from fedveil.defenses.chain import Chain
    from fedveil.defenses.clip import Clip
    from fedveil.defenses.gradient_dropout import GradientDropout
    from fedveil.defenses.guard import Guard
    from fedveil.defenses.noise import GaussianNoise, LaplaceNoise
    from fedveil.defenses.none import NoDefense
    from fedveil.federation.capture import Capture
    from fedveil.federation.run import federate
    from fedveil.federation.settings import Federation
    from fedveil.tasks.normalization import Normalization
    from fedveil.tasks.task import Task, task

_HOMES = {
    "DLG": "fedveil.attacks.dlg",
    "IDLG": "fedveil.attacks.idlg",
    "InvertingGradients": "fedveil.attacks.inverting_gradients",
    "Audit": "fedveil.auditing.settings",
    "audit": "fedveil.auditing.run",
    "Defense": "fedveil.defenses.base",
    "Chain": "fedveil.defenses.chain",
    "Clip": "fedveil.defenses.clip",
    "GradientDropout": "fedveil.defenses.gradient_dropout",
    "Guard": "fedveil.defenses.guard",
    "GaussianNoise": "fedveil.defenses.noise",
    "LaplaceNoise": "fedveil.defenses.noise",
    "NoDefense": "fedveil.defenses.none",
    "Capture": "fedveil.federation.capture",
    "federate": "fedveil.federation.run",
    "Federation": "fedveil.federation.settings",
    "Normalization": "fedveil.tasks.normalization",
    "Task": "fedveil.tasks.task",
    "task": "fedveil.tasks.task",
}

__all__ = [
    "DLG",
    "IDLG",
    "Audit",
    "Capture",
    "Chain",
    "Clip",
    "Defense",
    "Federation",
    "FedveilError",
    "GaussianNoise",
    "GradientDropout",
    "Guard",
    "InvertingGradients",
    "LaplaceNoise",
    "NoDefense",
    "Normalization",
    "Task",
    "__version__",
    "audit",
    "federate",
    "task",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedveil' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
