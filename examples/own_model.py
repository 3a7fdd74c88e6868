"""Audit a model and data of your own: `python examples/own_model.py`, offline, in seconds."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import fedveil as fv


class Net(nn.Module):
    """Any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.head = nn.Linear(8 * 12 * 12, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.features(images)).flatten(1))


def stripes(count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Images with a bright row in their upper half (class 0) or lower half (class 1): pixels between 0 and 1."""
    random = np.random.default_rng(0)
    images = random.random((count, 1, 12, 12), dtype=np.float32) / 2
    labels = random.integers(0, 2, count)
    for image, label, row in zip(images, labels, random.integers(0, 6, count), strict=True):
        image[0, row + 6 * label] = 1
    return images, labels


if __name__ == "__main__":
    torch.manual_seed(0)
    outcome = fv.audit(
        fv.Task(model=Net(), data=stripes(), clients=4, name="stripes"),
        defense=fv.defenses.GradientDropout(keep=0.7),
        attack="inverting-gradients:steps=100",
        federation=fv.FederationSettings(rounds=5, lr=0.05),
        settings=fv.AuditSettings(victims=8, candidates=40),
    )
    print(outcome)
    print(f"The report is {outcome.report('fedveil-out/own-model/report.html')}")
