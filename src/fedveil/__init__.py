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
    from fedveil.clients.choose import choose_backend
    from fedveil.defenses.base import Defense
    from fedveil.defenses.cdp import CDP
    from fedveil.defenses.chain import Chain
    from fedveil.defenses.clip import Clip
    from fedveil.defenses.dp_clip import DPClip
    from fedveil.defenses.dp_gaussian import DPGaussian
    from fedveil.defenses.dp_laplace import DPLaplace
    from fedveil.defenses.dp_sgd import DPSGD
    from fedveil.defenses.duchi import Duchi
    from fedveil.defenses.fedbarre import FedBARRE
    from fedveil.defenses.fedcrap import FedCRAP
    from fedveil.defenses.fedem import FedEM
    from fedveil.defenses.gradient_dropout import GradientDropout
    from fedveil.defenses.guard import Guard
    from fedveil.defenses.ldp_fl import LDPFL
    from fedveil.defenses.ldpm import LDPM
    from fedveil.defenses.masking import GradientMasking
    from fedveil.defenses.noise import GaussianNoise, LaplaceNoise
    from fedveil.defenses.noise_add import NoiseAdd
    from fedveil.defenses.none import NoDefense
    from fedveil.defenses.piecewise import PM
    from fedveil.defenses.pnpm import PNPM
    from fedveil.defenses.poisson import poisson_loader
    from fedveil.defenses.ppfa import PPFA
    from fedveil.defenses.pruning import GradientPruning
    from fedveil.defenses.sign import SignCompression
    from fedveil.defenses.soteria import Soteria
    from fedveil.defenses.spm import SPM
    from fedveil.federation.capture import Capture
    from fedveil.federation.run import federate
    from fedveil.federation.settings import Federation
    from fedveil.memory import keep_freed_memory
    from fedveil.tasks.normalization import Normalization
    from fedveil.tasks.task import Task, task
    from fedveil.workers import Workers

_HOMES = {
    "DLG": "fedveil.attacks.dlg",
    "IDLG": "fedveil.attacks.idlg",
    "InvertingGradients": "fedveil.attacks.inverting_gradients",
    "audit": "fedveil.auditing.run",
    "Audit": "fedveil.auditing.settings",
    "choose_backend": "fedveil.clients.choose",
    "Defense": "fedveil.defenses.base",
    "CDP": "fedveil.defenses.cdp",
    "Chain": "fedveil.defenses.chain",
    "Clip": "fedveil.defenses.clip",
    "DPClip": "fedveil.defenses.dp_clip",
    "DPGaussian": "fedveil.defenses.dp_gaussian",
    "DPLaplace": "fedveil.defenses.dp_laplace",
    "DPSGD": "fedveil.defenses.dp_sgd",
    "Duchi": "fedveil.defenses.duchi",
    "FedBARRE": "fedveil.defenses.fedbarre",
    "FedCRAP": "fedveil.defenses.fedcrap",
    "FedEM": "fedveil.defenses.fedem",
    "GradientDropout": "fedveil.defenses.gradient_dropout",
    "Guard": "fedveil.defenses.guard",
    "LDPFL": "fedveil.defenses.ldp_fl",
    "LDPM": "fedveil.defenses.ldpm",
    "GradientMasking": "fedveil.defenses.masking",
    "GaussianNoise": "fedveil.defenses.noise",
    "LaplaceNoise": "fedveil.defenses.noise",
    "NoiseAdd": "fedveil.defenses.noise_add",
    "NoDefense": "fedveil.defenses.none",
    "PM": "fedveil.defenses.piecewise",
    "PNPM": "fedveil.defenses.pnpm",
    "poisson_loader": "fedveil.defenses.poisson",
    "PPFA": "fedveil.defenses.ppfa",
    "GradientPruning": "fedveil.defenses.pruning",
    "SignCompression": "fedveil.defenses.sign",
    "Soteria": "fedveil.defenses.soteria",
    "SPM": "fedveil.defenses.spm",
    "Capture": "fedveil.federation.capture",
    "federate": "fedveil.federation.run",
    "Federation": "fedveil.federation.settings",
    "keep_freed_memory": "fedveil.memory",
    "Normalization": "fedveil.tasks.normalization",
    "Task": "fedveil.tasks.task",
    "task": "fedveil.tasks.task",
    "Workers": "fedveil.workers",
}

__all__ = [
    "CDP",
    "DLG",
    "DPSGD",
    "IDLG",
    "LDPFL",
    "LDPM",
    "PM",
    "PNPM",
    "PPFA",
    "SPM",
    "Audit",
    "Capture",
    "Chain",
    "Clip",
    "DPClip",
    "DPGaussian",
    "DPLaplace",
    "Defense",
    "Duchi",
    "FedBARRE",
    "FedCRAP",
    "FedEM",
    "Federation",
    "FedveilError",
    "GaussianNoise",
    "GradientDropout",
    "GradientMasking",
    "GradientPruning",
    "Guard",
    "InvertingGradients",
    "LaplaceNoise",
    "NoDefense",
    "NoiseAdd",
    "Normalization",
    "SignCompression",
    "Soteria",
    "Task",
    "Workers",
    "__version__",
    "audit",
    "choose_backend",
    "federate",
    "keep_freed_memory",
    "poisson_loader",
    "task",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedveil' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
