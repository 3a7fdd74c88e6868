"""The catalog of metrics."""

import subprocess
import sys

import pytest

from fedveil.errors import FedveilError
from fedveil.leakage.catalog import METRICS, metric


@pytest.mark.parametrize("module", ["catalog", "intervals", "modalities"])
def test_needs_no_torch(module: str) -> None:
    check = f"import sys, fedveil.leakage.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_has_all_metrics_under_their_own_names() -> None:
    named = ["mse", "psnr", "mse_pixel", "psnr_pixel", "ssim", "leakage_score", "identified", "rdlv", "attack_loss"]
    named += ["linked", "lpips", "kl", "feature_mse", "logit_mse", "identified_features"]
    assert set(named) <= set(METRICS)
    assert all(name == each.name and each.words.endswith(".") for name, each in METRICS.items())


def test_directions() -> None:
    high = {name for name, each in METRICS.items() if each.private == "high"}
    assert high == {"mse", "mse_pixel", "attack_loss", "diverged", "lpips", "kl", "feature_mse", "logit_mse"}
    assert metric("ssim").leaks_more(0.9, 0.1)
    assert not metric("ssim").leaks_more(0.1, 0.1)
    assert metric("mse").leaks_more(0.1, 0.9)


def test_formats() -> None:
    assert metric("psnr").format(11.94) == "11.9 dB"
    assert metric("ssim").format(0.12345) == "0.123"
    assert metric("identified").format(0.01) == "1 %"
    assert metric("mse").column == "MSE ↑"


def test_unknown_name() -> None:
    with pytest.raises(FedveilError, match="did you mean 'ssim'"):
        metric("sim")
