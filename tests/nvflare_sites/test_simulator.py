"""The example job in NVFlare's simulator, as a program of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

pytest.importorskip("nvflare")
EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare"
PATIENCE = 600


@pytest.mark.deployment
def test_the_example_trains_under_a_defense_and_goes_on_without_the_broken_site(tmp_path):
    done = subprocess.run(
        [sys.executable, "job.py", "--workspace", str(tmp_path), "--rounds", "2"],
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
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model.load_state_dict({name.removeprefix("layers."): torch.as_tensor(array) for name, array in weights.items()})
    digits = load_digits()
    found = model(torch.as_tensor(digits.images / 16, dtype=torch.float32)).argmax(1).numpy()
    assert (found == digits.target).mean() > 0.5
