"""Names can be listed without the second that importing torch takes."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from fedveil.registry import datasets, models
names = {r.kind: {n: e.summary for n, e in r.entries().items()} for r in (datasets, models)}
print(json.dumps([names, "torch" in sys.modules]))
"""


def test_data_sets_and_models_are_listed_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    names, imported = json.loads(done.stdout)
    assert not imported
    assert {"digits", "mnist", "fashion-mnist"} <= names["data set"].keys()
    assert {"cnn", "convnet", "lenet", "lenet5", "mlp", "resnet18"} <= names["model"].keys()
    assert all(summary for kind in names.values() for summary in kind.values())
