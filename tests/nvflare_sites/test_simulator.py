"""The example job in NVFlare's simulator, as a program of its own."""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedveil as fv

pytest.importorskip("nvflare")
EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare"
PATIENCE = 600


def network():
    """The example's model, by its names."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return nn.Sequential(OrderedDict(layers=layers))


@pytest.mark.deployment
def test_the_example_trains_under_a_defense_and_goes_on_without_the_broken_site(tmp_path):
    captures = tmp_path / "captures"
    job = [sys.executable, "job.py", "--workspace", str(tmp_path / "work"), "--captures", str(captures)]
    done = subprocess.run(
        [*job, "--rounds", "2"],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[-3000:]
    assert told.count("fedveil: protected by gradient-dropout") == 4  # two sites, two rounds
    assert told.count("Ignore the result from site-3") == 2
    assert "canary" not in told
    (path,) = tmp_path.rglob("FL_global_model.pt")
    weights = torch.load(path, weights_only=False)["model"]
    model = network()
    model.load_state_dict({name: torch.as_tensor(array) for name, array in weights.items()})
    digits = load_digits()
    found = model(torch.as_tensor(digits.images / 16, dtype=torch.float32)).argmax(1).numpy()
    assert (found == digits.target).mean() > 0.5
    names = [f"round-{number:04}-site-{site}.safetensors" for number in (1, 2) for site in (1, 2)]
    assert sorted(path.name for path in captures.iterdir()) == names, "what left, and not what was refused"
    quick = fv.attacks.InvertingGradients(steps=1, restarts=1, polish=0)
    result = fv.attack(captures / names[0], quick, model=network(), settings=fv.AuditSettings(link=False))
    assert "update of 599 images, captured in round 1" in result.result.attacked
