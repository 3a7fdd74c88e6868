"""The model that all sites train: a small network for the digits of scikit-learn."""

import torch
from torch import nn


class DigitsNet(nn.Module):
    """8×8 pictures of digits, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # all start alike
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.layers(pictures)
