"""The same defenses in a Flower federation: a client mod, Guard in a client's training, a server, a site's policy.

```python
from flwr.clientapp import ClientApp
import fedveil.flower

app = ClientApp(mods=[fedveil.flower.protect("spm:epsilon=1")])
```

docs/flower.md shows the whole way, docs/deploy.md the one of a site. Needs the extra `fedveil[flower]`.
"""

from __future__ import annotations

from importlib.util import find_spec

from fedveil.errors import FedveilError

if find_spec("flwr") is None:
    raise FedveilError("Flower is not installed: pip install 'fedveil[flower]'")

from fedveil.flower.guarded import guarded, loader
from fedveil.flower.protect import protect
from fedveil.flower.roster import introduce
from fedveil.flower.rules import Rules
from fedveil.flower.server import Outcome, Server
from fedveil.flower.settings import LocalSteps, ServerSettings
from fedveil.flower.vetting_mods import Behind, inspect, release

__all__ = [
    "Behind",
    "LocalSteps",
    "Outcome",
    "Rules",
    "Server",
    "ServerSettings",
    "guarded",
    "inspect",
    "introduce",
    "loader",
    "protect",
    "release",
]
